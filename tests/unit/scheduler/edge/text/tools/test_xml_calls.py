"""Calls in XML: values are text or JSON by the schema, and whatever is in them they become JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice_scheduler.edge.text.tools.formats import GLM45, QWEN3_CODER, ToolFormat
from coppice_scheduler.edge.text.tools.json_value import JsonValueEnd
from coppice_scheduler.edge.text.tools.tool import ToolCall
from coppice_scheduler.edge.text.tools.xml_calls import text_arguments
from tests.fakes.api.read_calls import in_pieces, read
from tests.fakes.api.written_calls import written

QWEN_F = (
    '<tool_call>\n<function=f>\n<parameter=s>\n1 "<b>\n\n</parameter>\n<parameter=a>\n2\n</parameter>\n'
    "<parameter=b>\nTrue\n</parameter>\n<parameter=c>\nno json\n</parameter>\n</function>\n</tool_call>"
)
QWEN_READ = '{"s": "1 \\"<b>\\n", "a": 2, "b": true, "c": "no json"}'
GLM_F = (
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1<b\n</arg_value>\n<arg_key>b</arg_key>\n"
    '<arg_value>["</arg_value>"]</arg_value>\n</tool_call>'
)


CASES: list[tuple[ToolFormat, str, str | None, list[tuple[str, str]]]] = [
    (QWEN3_CODER, f"Yes.\n{QWEN_F}\n{QWEN_F} then", "Yes. then", [("f", QWEN_READ)] * 2),
    (QWEN3_CODER, "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    (QWEN3_CODER, "<tool_call><function=nobody></function></tool_call>", None, []),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=s>\nx", "", [("f", "")]),
    (GLM45, f"Yes.\n{GLM_F}\n{GLM_F} then", "Yes. then", [("f", '{"s": "1<b\\n", "b": ["</arg_value>"]}')] * 2),
    (GLM45, "<tool_call>f\n</tool_call>", "", [("f", "{}")]),
    (GLM45, "<tool_call>nobody\n</tool_call>", None, []),
]


@pytest.mark.parametrize(("tool_format", "answer", "text", "calls"), CASES)
def test_what_is_said_and_what_is_called(
    tool_format: ToolFormat, answer: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    """`text` None: all of it is text."""
    for size in (1, 2, 3, 7, 1000):
        found = read(tool_format, in_pieces(answer, size))
        assert (found.text, found.calls) == (answer if text is None else text, calls)


@pytest.mark.parametrize(
    ("tool_format", "answer", "text", "calls"),
    [
        (QWEN3_CODER, "Yes. <tool_call>\n<func", "Yes.", []),
        (QWEN3_CODER, "Not <tool_call> so it is", "Not <tool_call> so it is", []),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=s>\nx\n</param", "", [("f", "")]),
        (QWEN3_CODER, QWEN_F[:-20], "", [("f", QWEN_READ[:-1])]),
        (QWEN3_CODER, QWEN_F.removesuffix("call>"), "", [("f", QWEN_READ)]),
        (GLM45, "Yes. <tool_call>f", "Yes.", []),
        (GLM45, GLM_F.removesuffix("call>"), "", [("f", '{"s": "1<b\\n", "b": ["</arg_value>"]')]),
    ],
)
def test_an_answer_that_was_cut_has_no_rest_of_an_opening_and_no_call_that_looks_complete(
    tool_format: ToolFormat, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 3, 1000):
        found = read(tool_format, in_pieces(answer, size), was_cut=True)
        assert (found.text, found.calls) == (text, calls)
        assert found.is_open == bool(calls and not calls[0][1].endswith("}"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def xml_value(tool_format: ToolFormat, key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if tool_format is QWEN3_CODER:
        return f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"


TEXTS = st.text(max_size=8) | st.lists(
    st.sampled_from(["<", "\n", '"', "\\", "</", "<parameter=", "</arg_key>", "é", "1", "{", "<tool_call>"]), max_size=6
).map("".join)
# Only `s` is a string by its schema.
XML_ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"s": TEXTS, "a": st.integers(), "b": st.dictionaries(TEXTS, JSON, max_size=3), "c": st.lists(TEXTS)}
)


@given(
    st.sampled_from([QWEN3_CODER, GLM45]), st.lists(XML_ARGUMENTS, min_size=1, max_size=3), st.integers(1, 9), st.data()
)
def test_values_of_xml_become_json_whatever_is_in_them(
    tool_format: ToolFormat, wanted: list[dict[str, object]], size: int, data: st.DataObject
) -> None:
    closing = data.draw(st.sampled_from(["", "</parameter>", "</arg_value>"]))  # within a string of JSON it is text
    wanted = [{**each, "c": [closing]} if "c" in each else each for each in wanted]
    values = ("".join(xml_value(tool_format, key, value) for key, value in each.items()) for each in wanted)
    answer = written(tool_format, [ToolCall("", "f", value) for value in values])
    found = read(tool_format, in_pieces(answer, size))
    assert (found.text, found.is_open) == ("", False)
    assert [json.loads(arguments) for _, arguments in found.calls] == wanted
    assert found == read(tool_format, [answer])


def test_the_schema_says_which_values_are_text() -> None:
    kinds = {
        "text": {"type": "string"},
        "words": {"enum": ["a", "b"]},
        "word": {"const": "a"},
        "mixed": {"enum": ["a", 1]},
        "number": {"type": "number"},
        "nullable": {"type": ["string", "null"]},
        "any": {},
        "yes": True,
    }
    assert text_arguments(json.dumps({"properties": kinds})) == {"text", "words", "word"}
    for schema in ("{}", "true", '{"properties": []}'):
        assert text_arguments(schema) == frozenset()


@pytest.mark.parametrize("num_closings", [200, 2000])
def test_a_value_is_read_once_however_many_closings_it_has_within_strings(
    num_closings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an answer full of them would hold up the front door."""
    num_read = 0
    found_by = JsonValueEnd.find

    def find(self: JsonValueEnd, text: str, at: int) -> int | None:
        nonlocal num_read
        num_read += len(text) - at
        return found_by(self, text, at)

    monkeypatch.setattr(JsonValueEnd, "find", find)
    value = ["</parameter>" * num_closings]
    values = xml_value(QWEN3_CODER, "c", value)
    found = read(QWEN3_CODER, [written(QWEN3_CODER, [ToolCall("", "f", values)])])
    assert [json.loads(arguments) for _, arguments in found.calls] == [{"c": value}]
    assert num_read <= len(values)
