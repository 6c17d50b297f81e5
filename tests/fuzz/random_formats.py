"""Random forms of an answer: JSON schemas, regexes and choices whose shortest and longest texts are bounded."""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]
DEPTH_MAX = 3


def random_schema(draw: random.Random, depth: int = DEPTH_MAX) -> Schema:
    """Strings, lists and numbers have bounds, so that a model without sense comes to an end."""
    simple = [_string, _integer, _number, _enum, _constant, _boolean, _pattern, _type_list]
    nested = [_object, _object, _array, _tuple, _any_of, _all_of, _reference]
    kind = draw.choice(simple if depth == 0 else nested + simple[:3])
    return kind(draw, depth)


def _string(draw: random.Random, _: int) -> Schema:
    if draw.random() < 0.2:
        return {"type": "string", "format": draw.choice(["uuid", "ipv4"])}  # dates have February 29 in any year
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 8)}


def _pattern(draw: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": f"^{random_regex(draw)}$"}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-1_000, 1_000)
    schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2_000)}
    if draw.random() < 0.2:
        schema = {"type": "integer", "minimum": 0, "maximum": 10_000, "multipleOf": draw.choice([2, 3, 7, 10])}
    return schema


def _number(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-50, 50)
    schema: Schema = {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 100)}
    return {**schema, "multipleOf": 0.25} if draw.random() < 0.3 else schema


def _enum(draw: random.Random, _: int) -> Schema:
    values: list[Any] = [draw.choice([None, True, 5, -2.5, "text", 'a "quote"', "\u00e9\u4e2d", [], {"a": 1}])]
    return {"enum": values + [_word(draw) for _ in range(draw.randint(0, 20))]}


def _constant(draw: random.Random, _: int) -> Schema:
    return {"const": draw.choice([None, False, 17, "word", [1, "two"], {"k": "v"}])}


def _boolean(_: random.Random, __: int) -> Schema:
    return {"type": "boolean"}


def _type_list(draw: random.Random, _: int) -> Schema:
    return {"type": draw.sample(["boolean", "null", "string"], 2), "maxLength": 5}


def _object(draw: random.Random, depth: int) -> Schema:
    names = sorted({_word(draw) for _ in range(draw.randint(0, 4))})
    properties = {name: random_schema(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 2)
    items = random_schema(draw, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}


def _tuple(draw: random.Random, depth: int) -> Schema:
    first = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "minItems": len(first), "items": False}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _all_of(draw: random.Random, _: int) -> Schema:
    low = draw.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + draw.randint(0, 50)}]}


def _reference(draw: random.Random, depth: int) -> Schema:
    """By a name that no other reference of the whole schema has: the definition goes to the top."""
    return {"$defs_of": random_schema(draw, depth - 1), "name": f"d{draw.getrandbits(40)}"}


def whole_schema(draw: random.Random) -> Schema:
    """With the definitions of its references where they belong."""
    definitions: Schema = {}

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$defs_of" in value:
            definitions[value["name"]] = place(value["$defs_of"])
            return {"$ref": f"#/$defs/{value['name']}"}
        return {key: place(item) for key, item in value.items()}

    schema = place(random_schema(draw))
    return {**schema, "$defs": definitions} if definitions else schema


def random_regex(draw: random.Random, depth: int = 2) -> str:
    """In the part of the syntax that Python and Rust read alike."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(
            [
                _word(draw),
                "[a-f]",
                "[^x-z]",
                "[0-9]",
                "\\d",
                "\\w\\s",
                "[\\d.]",
                "\\D",
                "\\\\d",
                "[A-Za-z_]",
                "(?:ab|cd)",
                "\\.",
            ]
        )
    inner = random_regex(draw, depth - 1)
    more = random_regex(draw, depth - 1)
    low = draw.randint(0, 2)
    return draw.choice(
        [f"(?:{inner}){{{low},{low + 3}}}", f"(?:{inner}|{more})", f"{inner}{more}", f"(?:{inner})?{more}"]
    )


def random_choices(draw: random.Random) -> list[str]:
    made = [_word(draw) + draw.choice(["", " ", '"', "\\", "\n", "\u00e9", "\U0001f642"]) for _ in range(20)]
    return sorted(set(made))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6)))
