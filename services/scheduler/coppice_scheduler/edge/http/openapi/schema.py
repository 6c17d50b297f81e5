"""Pieces of JSON schemas that requests and answers are described with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXT: Schema = {"type": "string"}
LEFT_OUT: Schema = {"type": "null"}  # what else an object may have: null is the same as a field left out


def one_of(kind: str, text: str = "", **rules: Any) -> Schema:
    """A value of one type, or null, which is the same as leaving it out."""
    return {"type": [kind, "null"], **({"description": text} if text else {}), **rules}


def body(properties: dict[str, Schema], required: Iterable[str], text: str) -> Schema:
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def inner(properties: dict[str, Schema], required: Iterable[str], text: str) -> Schema:
    """An object within a body."""
    return {**body(properties, required, text), "additionalProperties": LEFT_OUT}


def ref(name: str) -> str:
    return f"#/components/schemas/{name}"


def exactly(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
