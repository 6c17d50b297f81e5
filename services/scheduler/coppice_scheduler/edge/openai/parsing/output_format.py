"""`response_format`, and vLLM's `structured_outputs` and older `guided_*`: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.text.output_format import ASKED_KINDS, MAX_FORMAT_CHOICES, FormatKind, OutputFormat

RESPONSE_FORMAT, STRUCTURED_OUTPUTS = "response_format", "structured_outputs"
GUIDED = {f"guided_{kind}": kind for kind in ASKED_KINDS if kind is not FormatKind.JSON_OBJECT}
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def output_format_of(fields: Fields) -> OutputFormat | None:
    """None where any answer will do. Raises ApiError."""
    asked = [_response_format(fields), _structured_outputs(fields)]
    asked += [_format(fields, name, kind, name) for name, kind in GUIDED.items()]
    found = [each for each in asked if each is not None]
    if len(found) > 1:
        raise invalid(
            f"{found[0].field} and {found[1].field} both say what the answer looks like; send one.",
            param=found[1].field,
        )
    return found[0] if found else None


def _response_format(fields: Fields) -> OutputFormat | None:
    value = fields.get(RESPONSE_FORMAT)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.wrong(RESPONSE_FORMAT, "an object")
    inner = Fields(value, f"{RESPONSE_FORMAT}.")
    kind = inner.required_text("type")
    _only(value, ("type", "json_schema") if kind == "json_schema" else ("type",), RESPONSE_FORMAT)
    match kind:
        case "text":
            return None
        case "json_object":
            return OutputFormat(FormatKind.JSON_OBJECT, "", RESPONSE_FORMAT)
        case "json_schema":
            return _named_schema(inner)
    raise invalid(
        f"response_format.type is {kind[:50]!r}; supported are text, json_object, json_schema.",
        param=f"{RESPONSE_FORMAT}.type",
        code="unsupported_parameter",
    )


def _named_schema(fields: Fields) -> OutputFormat:
    """`strict` or not, the answer follows the schema."""
    name = f"{RESPONSE_FORMAT}.json_schema"
    value = fields.get("json_schema")
    if not isinstance(value, dict):
        raise fields.wrong("json_schema", "an object with name and schema")
    _only(value, _SCHEMA_FIELDS, name)
    inner = Fields(value, f"{name}.")
    for text in ("name", "description"):
        inner.text(text)
    inner.flag("strict")
    if not isinstance(inner.get("schema"), dict):
        raise inner.wrong("schema", "an object")
    return OutputFormat(FormatKind.JSON, _as_text(value["schema"]), f"{name}.schema")


def _structured_outputs(fields: Fields) -> OutputFormat | None:
    value = fields.get(STRUCTURED_OUTPUTS)
    if value in (None, {}):
        return None
    if not isinstance(value, dict):
        raise fields.wrong(STRUCTURED_OUTPUTS, "an object")
    _only(value, ASKED_KINDS, STRUCTURED_OUTPUTS)
    inner = Fields(value, f"{STRUCTURED_OUTPUTS}.")
    asked = [_format(inner, kind.value, kind, f"{STRUCTURED_OUTPUTS}.{kind}") for kind in ASKED_KINDS]
    found = [each for each in asked if each is not None]
    if len(found) != 1:
        names = ", ".join(ASKED_KINDS)
        raise invalid(f"structured_outputs must have exactly one of {names}.", param=STRUCTURED_OUTPUTS)
    return found[0]


def _format(fields: Fields, name: str, kind: FormatKind, field: str) -> OutputFormat | None:
    read: Mapping[FormatKind, Callable[[Fields, str], str | tuple[str, ...] | None]] = {
        FormatKind.JSON_OBJECT: lambda fields, name: "" if fields.flag(name) else None,
        FormatKind.JSON: _schema,
        FormatKind.CHOICE: _choices,
    }
    value = read.get(kind, Fields.text)(fields, name)
    return None if value is None else OutputFormat(kind, value, field)


def _schema(fields: Fields, name: str) -> str | None:
    """An object, or its text."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise fields.wrong(name, "a JSON schema: an object, or its text")
    return _as_text(value)


def _choices(fields: Fields, name: str) -> tuple[str, ...] | None:
    value = fields.at_most(name, MAX_FORMAT_CHOICES, "strings")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise fields.wrong(name, "a list of strings")
    return tuple(value)


def _as_text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _only(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, inner in value.items():
        if name not in known and inner is not None:
            param = f"{where}.{name[:100]}"
            message = f"{param} is not supported; known are {', '.join(known)}."
            raise invalid(message, param=param, code="unsupported_parameter")
