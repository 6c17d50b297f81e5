"""Pieces of JSON schemas that requests and answers are described with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]


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


def ref(name: str) -> str:
    return f"#/components/schemas/{name}"
