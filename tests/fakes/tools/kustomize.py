"""What Kustomize makes of a folder, as far as our trees need it: resources, components, a namespace, JSON patches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml


def built(files: Mapping[str, str], folder: str) -> list[dict[str, Any]]:
    """Objects of one folder of a tree. Raises KeyError for what a kustomization names and is not there."""
    said = yaml.safe_load(files[f"{folder}/kustomization.yaml"])
    assert not said.keys() - {"apiVersion", "kind", "namespace", "resources", "patches"}, said
    found: list[dict[str, Any]] = []
    for name in said.get("resources", []):
        path = _normal(f"{folder}/{name}")
        found += [*yaml.safe_load_all(files[path])] if path.endswith(".yaml") else built(files, path)
    for patch in said.get("patches", []):
        chosen = [one for one in found if _is(one, patch["target"])]
        assert chosen, f"{folder} patches {patch['target']}, which is not there"
        for one in chosen:
            for step in yaml.safe_load(patch["patch"]):
                _apply(one, step)
    for one in found:
        if "namespace" in said:
            one["metadata"]["namespace"] = said["namespace"]
    return found


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _is(one: dict[str, Any], target: dict[str, str]) -> bool:
    return one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]


def _apply(document: Any, step: dict[str, Any]) -> None:
    """RFC 6902, `add` and `replace`."""
    *above, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
    for part in above:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if isinstance(document, list):
        if last == "-":
            document.append(step["value"])
            return
        assert step["op"] == "replace"
        document[int(last)] = step["value"]
        return
    assert (step["op"] == "replace") == (last in document), step
    document[last] = step["value"]
