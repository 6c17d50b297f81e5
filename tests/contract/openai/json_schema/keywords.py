"""What becomes of each keyword of JSON Schema 2020-12, and of older drafts: a table of docs/API.md and a test are made
of this. The kind of test is that of the JSONSchemaTestSuite; schemas and values are our own.

A value is written as JSON, since an answer is a text: `1.0` and `1` are one value, and only one of them may be written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Schema = dict[str, Any]


class Becomes(StrEnum):
    FOLLOWED = "followed"
    SAYS_NOTHING = "taken, and says nothing"
    REFUSED = "400"


@dataclass(frozen=True)
class Case:
    schema: Schema
    valid: tuple[str, ...]
    invalid: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()  # valid, and no answer has them
    loose: tuple[str, ...] = ()  # invalid, and an answer may have them


@dataclass(frozen=True)
class Keyword:
    becomes: Becomes
    cases: tuple[Case, ...] = ()
    refused: tuple[Schema, ...] = ()  # schemas that have it, and get 400
    note: str = ""


def _follows(*cases: Case, refused: tuple[Schema, ...] = (), note: str = "") -> Keyword:
    return Keyword(Becomes.FOLLOWED, cases, refused, note)


def _refuses(*schemas: Schema, note: str = "") -> Keyword:
    return Keyword(Becomes.REFUSED, refused=schemas, note=note)


def _says_nothing(value: Any, note: str = "") -> Any:
    """For the keyword `name`, a schema of a whole number with it."""

    def of(name: str) -> Keyword:
        case = Case({name: value, "type": "integer"}, ("1", "-7"), ('"a"', "null"))
        return Keyword(Becomes.SAYS_NOTHING, (case,), note=note)

    return of


def _format(name: str, valid: tuple[str, ...], invalid: tuple[str, ...], loose: tuple[str, ...] = ()) -> Case:
    def quoted(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f'"{text}"' for text in texts)

    schema = {"type": "string", "format": name}
    return Case(schema, quoted(valid), quoted(invalid), loose=quoted(loose))


FORMATS = (
    _format("date", ("2026-11-24", "2024-02-29"), ("2026-02-30", "24.11.2026"), ("2023-02-29",)),
    _format("time", ("10:00:00Z", "23:59:60Z"), ("10:00", "25:00:00Z"), ("10:00:60Z",)),
    _format("date-time", ("2026-11-24T10:00:00Z",), ("2026-11-24", "2026-11-24T10:00:00"), ("2023-02-29T10:00:00Z",)),
    _format("duration", ("P1D", "PT5M", "P2W"), ("1D", "P", "PT", "P1W2D")),
    _format("email", ("a@example.com",), ("a", "a@", "@b")),
    _format("hostname", ("example.com",), ("-a", "a..b", "a_b")),
    _format("ipv4", ("127.0.0.1",), ("256.0.0.1", "1.2.3", "01.2.3.4")),
    _format("ipv6", ("::1", "2001:db8:0:0:0:0:0:1"), ("::1::", "12345::", "1.2.3.4")),
    _format("uri", ("https://example.com/a?b#c", "urn:a:b"), ("example", "//example.com", "https://a b")),
    _format("uuid", ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567", "123e4567-e89b-12d3-a456-42661417400g")),
)
OTHER_FORMATS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
)

NULL: Schema = {"type": "null"}
INTEGER: Schema = {"type": "integer"}
A_AND_B: Schema = {"type": "object", "properties": {"a": NULL, "b": INTEGER}}
OTHERS = ('"a"', "null", "true", "[1]", '{"a":1}')  # of no number, to which bounds of numbers say nothing

REFERENCES: dict[str, Keyword] = {
    "$ref": _follows(
        Case({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, ("1",), ("null",)),
        Case({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}, "minimum": 3}, ("3",), ("2", "null")),
        Case({"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": NULL}}, ("null",), ("1",)),
        Case(
            {"type": "object", "properties": {"v": NULL, "n": {"$ref": "#"}}, "additionalProperties": False},
            ("{}", '{"v":null,"n":{"n":{"v":null}}}'),
            ('{"n":{"v":1}}', '{"n":1}'),
        ),
        refused=({"$ref": "https://example.com/other"},),
        note="within the schema",
    ),
    "$defs": _follows(Case({"$defs": {"n": NULL}, "anyOf": [{"$ref": "#/$defs/n"}, INTEGER]}, ("null", "1"), ('"a"',))),
    "definitions": _follows(
        Case({"definitions": {"n": NULL}, "$ref": "#/definitions/n"}, ("null",), ("1",)), note="of older drafts"
    ),
    "$id": _follows(
        Case(
            {"$id": "https://example.com/a", "$ref": "b", "$defs": {"x": {"$id": "b", "type": "null"}}},
            ("null",),
            ("1",),
        )
    ),
    "$anchor": _follows(Case({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}}, ("null",), ("1",))),
    "$dynamicRef": _refuses({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n"}}}),
    "$dynamicAnchor": _refuses({"$dynamicAnchor": "n", "type": "null"}),
    "$recursiveRef": _refuses({"$recursiveRef": "#"}, note="of older drafts"),
}
OF_ANY: dict[str, Keyword] = {
    "type": _follows(
        Case(INTEGER, ("0", "-12", "30"), ("1.5", "01", "+1", '"1"', "null"), unwritten=("1.0", "1e2")),
        Case({"type": "number"}, ("0", "-1.5", "1e2", "1E+2"), (".5", "1.", '"1"')),
        Case({"type": "string"}, ('""', '"a"', '"\\n\\t\\\\"', '"é"'), ("a", "1", '"a'), ('"\\u00e9"', '"\\u0001"')),
        Case({"type": "boolean"}, ("true", "false"), ("True", "1")),
        Case({"type": ["null", "array"]}, ("null", "[]", '[1,"a",{}]'), ("{}", "[1")),
        Case({"type": "object"}, ("{}", '{"a":[1]}'), ("[]", '{"a"}'), ('{"\\u0061":1}',)),
        refused=({"type": "strin"},),
        note="`integer` is written without fraction and exponent",
    ),
    "enum": _follows(
        Case({"enum": [1, "a", None, [1], {"a": 1}]}, ("1", '"a"', "null", "[1]", '{"a":1}'), ("2", '"b"', "[]")),
        Case({"enum": [1, "a"], "type": "string"}, ('"a"',), ("1",), ('"\\u0061"',)),
        refused=({"enum": []},),
    ),
    "const": _follows(
        Case({"const": {"a": [1], "b": 2}}, ('{"a":[1],"b":2}',), ('{"a":[1]}', "null"), ('{"b":2,"a":[1]}',)),
        Case({"const": 1}, ("1",), ("2", '"1"'), ("1.0",)),
        note="properties of objects in their order",
    ),
    "allOf": _follows(
        Case({"allOf": [INTEGER, {"minimum": 3}]}, ("3",), ("2", '"a"')),
        Case({"allOf": [{"type": "string", "pattern": "^a"}, {"maxLength": 2}]}, ('"ab"',), ('"abc"', '"b"')),
        Case(
            {"allOf": [{**A_AND_B, "required": ["a"]}, {"type": "object", "required": ["b"]}]},
            ('{"a":null,"b":1}',),
            ('{"a":null}', '{"b":1}'),
        ),
    ),
    "anyOf": _follows(
        Case({"anyOf": [{"type": "string", "maxLength": 1}, INTEGER]}, ('"a"', "1"), ('"ab"', "null")),
        Case({"anyOf": [{"type": "string"}, INTEGER], "minimum": 3}, ('"a"', "3"), ("2", "null")),
    ),
    "oneOf": _follows(
        Case({"oneOf": [{"const": 1}, {"const": "a"}]}, ("1", '"a"'), ("2", "null")),
        Case(
            {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b")
                ]
            },
            ('{"k":"a"}', '{"k":"b","x":1}'),
            ('{"k":"c"}', "{}"),
        ),
        refused=({"oneOf": [{"type": "number"}, INTEGER]}, {"oneOf": [{"minimum": 2}, {"maximum": 3}]}),
        note="of schemas that exclude each other by their types or constants",
    ),
    "not": _refuses({"not": {}}, {"type": "object", "properties": {"a": {"not": NULL}}}),
    "if": _refuses({"if": NULL}, {"if": NULL, "then": INTEGER, "else": {}}),
    "then": _refuses({"if": NULL, "then": NULL}),
    "else": _refuses({"if": NULL, "else": NULL}),
}
BOUNDED = "numbers that have a bound are written without exponent"
OF_NUMBERS: dict[str, Keyword] = {
    "minimum": _follows(
        Case({"type": "number", "minimum": 3}, ("3", "3.0", "30"), ("2.99", "-4"), ("1e1", "4e0")),
        Case({"minimum": 3}, ("3", *OTHERS), ("2",)),
        note=BOUNDED,
    ),
    "maximum": _follows(
        Case({"maximum": 3}, ("3", "2.5", "-9", *OTHERS), ("4", "3.01"), ("1e0",)),
        note=BOUNDED,
    ),
    "exclusiveMinimum": _follows(
        Case({"type": "number", "exclusiveMinimum": 3}, ("3.1", "4"), ("3", "3.000", "2"), ("1e1",)), note=BOUNDED
    ),
    "exclusiveMaximum": _follows(
        Case({"type": "integer", "exclusiveMaximum": 3}, ("2", "-3"), ("3", "4")),
        Case({"exclusiveMaximum": 3}, ("2.99", "-3", *OTHERS), ("3", "30"), ("1e0",)),
        note=BOUNDED,
    ),
    "multipleOf": _follows(
        Case({"type": "integer", "multipleOf": 3}, ("0", "3", "-6", "12"), ("4", "10"), ("6.0",)),
        Case({"type": "number", "multipleOf": 0.5}, ("0.5", "1", "1.0", "2.5"), ("0.3", "1.25")),
        refused=({"type": "integer", "multipleOf": 999_983}, {"type": "integer", "multipleOf": 0}),
        note="at most 20,000 units of its last digit, all of a schema together",
    ),
}
OF_STRINGS: dict[str, Keyword] = {
    "minLength": _follows(Case({"minLength": 2}, ('"ab"', '"éé"', "1", "null"), ('"a"', '""'))),
    "maxLength": _follows(Case({"type": "string", "maxLength": 2}, ('""', '"\\n\\n"', '"😀😀"'), ('"abc"', '"éab"'))),
    "pattern": _follows(
        Case({"type": "string", "pattern": "b"}, ('"b"', '"abc"'), ('"a"', '""')),
        Case({"pattern": "^a+$"}, ('"aa"', "1", "null"), ('"ab"', '"ba"', '""')),
        refused=({"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "("}),
        note="without look-around and back-references",
    ),
    "format": _follows(
        *FORMATS,
        refused=tuple({"type": "string", "format": name} for name in (*OTHER_FORMATS, "shoe size")),
        note=f"{', '.join(str(case.schema['format']) for case in FORMATS)}, and no other; a date "
        "may be 29 February of any year, a time may have a leap second in any minute",
    ),
}
OF_ARRAYS: dict[str, Keyword] = {
    "items": _follows(
        Case({"type": "array", "items": INTEGER}, ("[]", "[1,2]"), ("[null]", "[1,null]")),
        Case({"items": False}, ("[]", "1"), ("[1]",)),
    ),
    "prefixItems": _follows(
        Case(
            {"type": "array", "prefixItems": [NULL, INTEGER]}, ("[]", "[null]", "[null,1,true]"), ("[1]", "[null,{}]")
        ),
        Case(
            {"prefixItems": [NULL], "items": INTEGER, "type": "array"}, ("[null]", "[null,1,2]"), ("[1]", "[null,null]")
        ),
    ),
    "additionalItems": Keyword(
        Becomes.SAYS_NOTHING,
        (Case({"type": "array", "additionalItems": False}, ("[]", "[1]"), ("1",)),),
        note="of older drafts; there, and in a list of `items`, as `items` beside `prefixItems`",
    ),
    "minItems": _follows(Case({"type": "array", "minItems": 1}, ("[1]", "[1,2]"), ("[]",))),
    "maxItems": _follows(Case({"type": "array", "maxItems": 1}, ("[]", "[1]"), ("[1,2]",))),
    "uniqueItems": _refuses({"type": "array", "uniqueItems": True}),
    "contains": _refuses({"type": "array", "contains": NULL}),
    "minContains": _refuses({"type": "array", "contains": NULL, "minContains": 2}),
    "maxContains": _refuses({"type": "array", "contains": NULL, "maxContains": 2}),
    "unevaluatedItems": _refuses({"type": "array", "unevaluatedItems": False}),
}
OF_OBJECTS: dict[str, Keyword] = {
    "properties": _follows(
        Case(
            A_AND_B,
            ("{}", '{"a":null}', '{"b":1}', '{"a":null,"b":1,"c":"x"}'),
            ('{"a":1}', '{"b":null}', '{"\\u0061":1}', '{"a":null,"\\u0062":"x"}'),
            ('{"b":1,"a":null}', '{"c":1,"b":1}'),
        ),
        Case({"properties": {"a": False}}, ("{}", '{"b":1}', "1"), ('{"a":1}', '{"\\u0061":1}')),
        note="in the order of the schema, others behind them",
    ),
    "patternProperties": _follows(
        Case(
            {"type": "object", "patternProperties": {"^x": INTEGER}},
            ("{}", '{"xa":1,"y":null}'),
            ('{"xa":null}', '{"\\u0078a":null}'),
        ),
        refused=({"type": "object", "patternProperties": {"x": INTEGER, "y": NULL}},),
        note="of patterns that exclude each other",
    ),
    "additionalProperties": _follows(
        Case({**A_AND_B, "additionalProperties": False}, ('{"a":null,"b":1}', "{}"), ('{"c":1}', '{"a":null,"c":1}')),
        Case({**A_AND_B, "additionalProperties": NULL}, ('{"a":null,"c":null}',), ('{"c":1}', '{"b":null}')),
    ),
    "required": _follows(
        Case(
            {"required": ["b", "a"]},
            ('{"b":1,"a":1,"c":1}', "[]", "1"),
            ("{}", '{"b":1}', '{"a":1}'),
            ('{"a":1,"b":1}',),
        ),
        Case({**A_AND_B, "required": ["a"]}, ('{"a":null}',), ("{}", '{"b":1}')),
        note="in the order of `properties`, or of the list",
    ),
    "minProperties": _follows(
        Case({"minProperties": 1, "type": "object"}, ('{"a":1}', '{"a":1,"b":1}'), ("{}",)),
        Case(
            {"minProperties": 2, "type": "object", "required": ["a"]},
            ('{"a":1,"b":1}',),
            ('{"a":1}', "{}", '{"a":1,"a":2}', '{"a":1,"\\u0061":2}'),
        ),
        refused=(
            {"type": "object", "minProperties": 2},
            {"type": "object", "minProperties": 1, "properties": {"a": {}}},
        ),
        note="1, or one more than `required` has names, at most; where all of `properties` are required",
    ),
    "maxProperties": _follows(
        Case({"maxProperties": 1, "type": "object"}, ("{}", '{"a":1}'), ('{"a":1,"b":1}',)),
        refused=({"type": "object", "maxProperties": 1, "properties": {"a": {}}},),
        note="where all of `properties` are required",
    ),
    "propertyNames": _refuses({"type": "object", "propertyNames": {"pattern": "^a"}}),
    "dependentRequired": _refuses({"type": "object", "dependentRequired": {"a": ["b"]}}),
    "dependentSchemas": _refuses({"type": "object", "dependentSchemas": {"a": {}}}),
    "dependencies": _refuses({"type": "object", "dependencies": {"a": ["b"]}}, note="of older drafts"),
    "unevaluatedProperties": _refuses({"type": "object", "unevaluatedProperties": False}),
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"
OF_NO_VALUE: dict[str, Keyword] = {
    name: says(name)
    for name, says in {
        "$schema": _says_nothing(DRAFT),
        "$vocabulary": _says_nothing({"https://json-schema.org/draft/2020-12/vocab/core": True}),
        "$comment": _says_nothing("c"),
        "title": _says_nothing("t"),
        "description": _says_nothing("d"),
        "default": _says_nothing("a"),
        "examples": _says_nothing(["a"]),
        "deprecated": _says_nothing(True),
        "readOnly": _says_nothing(True),
        "writeOnly": _says_nothing(True),
        "contentEncoding": _says_nothing("base64"),
        "contentMediaType": _says_nothing("application/json"),
        "contentSchema": _says_nothing(NULL),
        "nullable": _says_nothing(True, "no keyword of JSON Schema: send `null` among the types"),
    }.items()
}

KEYWORDS: dict[str, Keyword] = {
    **REFERENCES,
    **OF_ANY,
    **OF_NUMBERS,
    **OF_STRINGS,
    **OF_ARRAYS,
    **OF_OBJECTS,
    **OF_NO_VALUE,
}
