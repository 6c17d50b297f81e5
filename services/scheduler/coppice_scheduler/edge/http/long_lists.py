"""JSON with long lists, parsed and written in slices: other threads get their turn between two of them.

    {"prompt": [5,7,...,9], "n": 1}   -->   [5,7,...] + [...] + [...,9]      slices, each parsed by itself
                                      -->   {"prompt": "MARK", "n": 1}       the rest, at once

The parser keeps the interpreter to itself for as long as it takes, and token ids are what large bodies are made of.
Whatever is not this plain is parsed at once, so what comes out is what the parser would have made, errors included.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

SLICE_BYTES = 64 * 1024
SLICE_ENTRIES = 256
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LIST = re.compile(rb"\[([0-9,\s]{%d,}+)\]" % SLICE_BYTES)


def parse_json(raw: bytes) -> Any:
    """Raises ValueError. NaN and Infinity are not JSON."""
    found = _LIST.search(raw) if len(raw) > SLICE_BYTES else None
    if found is None:
        return from_json(raw, allow_inf_nan=False)
    mark = secrets.token_hex()
    try:
        value = parse_json(b'%b"%b"%b' % (raw[: found.start()], mark.encode(), raw[found.end() :]))
        if _put(value, mark, _numbers(found[1])):
            return value
    except ValueError:
        pass  # the list is in a text, or something is wrong: the parser says it with the place in the whole
    return from_json(raw, allow_inf_nan=False)


def _numbers(entries: bytes) -> list[Any]:
    """Raises ValueError."""
    numbers: list[Any] = []
    at = 0
    while at <= len(entries):
        end = entries.find(b",", at + SLICE_BYTES)
        end = len(entries) if end < 0 else end
        part = entries[at:end]
        parsed = from_json(b"[%b]" % part)
        if len(parsed) != part.count(b",") + 1:
            raise ValueError("a slice without an entry")
        numbers += parsed
        at = end + 1
    return numbers


def _put(value: Any, mark: str, numbers: list[Any]) -> bool:
    """Put the list where its mark is: at a name of the outer object, or in a list there. False: it is at neither."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if inner == mark:
            value[name] = numbers
            return True
        if isinstance(inner, list) and mark in inner:
            inner[inner.index(mark)] = numbers
            return True
    return False


def write_json(value: Any) -> bytes:
    """As `json.dumps` writes it. Lone surrogates become `?`.

    Objects are walked, and short lists in the outermost one; other lists are written in slices.
    """
    return b"".join(piece.encode("utf-8", "replace") for piece in pieces_of(value))


def pieces_of(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, dict) and value:
        comma = "{"
        for name, inner in value.items():
            yield f"{comma}{_written(name)}:"
            yield from pieces_of(inner, depth + 1)
            comma = ","
        yield "}"
    elif isinstance(value, list) and value:
        comma = "["
        for at in range(0, len(value), SLICE_ENTRIES):
            part = value[at : at + SLICE_ENTRIES]
            if depth > 1 or len(value) > SLICE_ENTRIES:
                yield comma + _written(part)[1:-1]
                comma = ","
                continue
            for entry in part:
                yield comma
                yield from pieces_of(entry, depth + 1)
                comma = ","
        yield "]"
    else:
        yield _written(value)
