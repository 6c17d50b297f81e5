"""Objects of operators against schemas: python custom_resources.py OBJECTS.yaml [FOLDER OF CUSTOM RESOURCE DEFINITIONS]

`custom_resources.json` has the fields that we set, in our words. With a folder of the operators' own definitions,
objects are validated against those, too, no field may be one too many, and what we wrote is compared with them. Prints
what is wrong, a line each; exit code 1 then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]
OURS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
DEFS: Schema = OURS.pop("$defs")


def strict(schema: Any) -> Any:
    """No property may be there that is not named, as the API server prunes it or `kubectl` refuses it."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return strict(DEFS[schema["$ref"].rsplit("/", 1)[1]])
    result = {name: strict(part) for name, part in schema.items() if name != "properties"}
    if "properties" in schema:
        result["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


def problems_of(one: dict[str, Any], schema: Schema, whose: str) -> Iterator[str]:
    name = f"{one['kind']} {one['metadata']['name']}"
    for error in Draft202012Validator(strict(schema)).iter_errors(one["spec"]):
        yield f"{name}: spec{error.json_path[1:]}: {error.message} ({whose})"


def differences(ours: Schema, theirs: Schema, where: str) -> Iterator[str]:
    """What we say and they do not: fields, types, values; what they want, and we do not."""
    if theirs.get("type") != ours["type"] and not theirs.get("x-kubernetes-int-or-string"):
        yield f"{where} is of type {theirs.get('type')}, not {ours['type']}"
    for value in ours.get("enum", []):
        if "enum" in theirs and value not in theirs["enum"]:
            yield f"{where} is never {value!r}"
    for name in set(theirs.get("required", [])) - set(ours.get("required", [])):
        yield f"{where} has to have {name}"
    for name, part in ours.get("properties", {}).items():
        if name not in theirs.get("properties", {}):
            yield f"{where}.{name} is no field"
        else:
            yield from differences(part, theirs["properties"][name], f"{where}.{name}")
    if "items" in ours:
        yield from differences(ours["items"], theirs.get("items", {}), f"{where}[]")
    if isinstance(ours.get("additionalProperties"), dict):
        yield from differences(ours["additionalProperties"], theirs.get("additionalProperties", {}), f"{where}.*")


def definitions(folder: Path) -> dict[tuple[str, str], Schema]:
    """Schemas of `spec` by API version and kind."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document and document["kind"] == "CustomResourceDefinition":
                for version in document["spec"]["versions"]:
                    place = f"{document['spec']['group']}/{version['name']}", document["spec"]["names"]["kind"]
                    found[place] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def checked(objects: list[dict[str, Any]], folder: Path | None) -> Iterator[str]:
    theirs = definitions(folder) if folder is not None else {}
    for kind, ours in OURS.items():
        if folder is not None and (ours["apiVersion"], kind) not in theirs:
            yield f"{folder} has no definition of {kind} in {ours['apiVersion']}"
        elif folder is not None:
            for difference in differences(unfolded(ours["spec"]), theirs[ours["apiVersion"], kind], "spec"):
                yield f"{kind}: {difference} ({ours['source']})"
    for one in objects:
        ours = OURS.get(one["kind"])
        if ours is None or one["apiVersion"] != ours["apiVersion"]:
            yield f"{one['kind']} of {one['apiVersion']} is not described"
            continue
        yield from problems_of(one, ours["spec"], "as we know it")
        if (one["apiVersion"], one["kind"]) in theirs:
            yield from problems_of(one, theirs[one["apiVersion"], one["kind"]], "its definition")


def unfolded(schema: Any) -> Any:
    """With what it refers to in place."""
    if isinstance(schema, list):
        return [unfolded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return DEFS[schema["$ref"].rsplit("/", 1)[1]]
    return {name: unfolded(part) for name, part in schema.items()}


def main(objects: str, folder: str | None = None) -> int:
    documents = [one for one in yaml.safe_load_all(Path(objects).read_text(encoding="utf-8")) if one]
    problems = list(checked(documents, Path(folder) if folder else None))
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
