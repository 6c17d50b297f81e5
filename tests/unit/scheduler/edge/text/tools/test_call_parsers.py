"""Calls in what a model wrote: every family's syntax, cut anywhere, right and wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice_scheduler.edge.text.markers import SPACE_MAX
from coppice_scheduler.edge.text.tools.call_parser import HELD_MAX
from coppice_scheduler.edge.text.tools.formats import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    ToolFormat,
)
from coppice_scheduler.edge.text.tools.json_calls import PARSED_MAX, JsonCalls
from coppice_scheduler.edge.text.tools.tool import ToolCall
from tests.fakes.api.read_calls import NAMES, in_pieces, parser_of, read, taken
from tests.fakes.api.written_calls import written

HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

CASES: list[tuple[ToolFormat, str, str | None, list[tuple[str, str]]]] = [
    (HERMES, "Nothing.", "Nothing.", []),
    (HERMES, " white \n", " white \n", []),
    (HERMES, HERMES_F, "", [("f", '{"a": 1}')]),
    (HERMES, f"First \n{HERMES_F}\n{HERMES_F}\n", "First", [("f", '{"a": 1}')] * 2),
    (HERMES, f"{HERMES_F} then", " then", [("f", '{"a": 1}')]),
    (HERMES, f"{' ' * 1_000}{HERMES_F}{' ' * 1_000}{HERMES_F}", " " * (2_000 - 2 * SPACE_MAX), [("f", '{"a": 1}')] * 2),
    (HERMES, '<tool_call>{"arguments": {"q": [1, "}"]}, "name": "g.h"}', "", [("g.h", '{"q": [1, "}"]}')]),
    (HERMES, '<tool_call>{"id": {"x": []}, "name": "f", "more": 1}</tool_call>', "", [("f", "{}")]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\"<tool_call>', "", [("f", '{"a": "\\"<tool_call>')]),
    (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g.h", "arguments": {"b": {}}}]</tool_call>',
        "",
        [("f", "{}"), ("g.h", '{"b": {}}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "parameters": null, "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', "", [("f", "[1]")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}', "", [("f", "{}")]),
    (HERMES, f'<tool_call>{{"name": "{"f" * 2_000}"}}', None, []),
    (HERMES, f'<tool_call>{{"{"k" * 2_000}": 1, "name": "f"}}', None, []),
    (HERMES, f'<tool_call>{{"name": {"[" * 900}{"]" * 900}}}', None, []),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": "{"x" * PARSED_MAX}"}}', "", [("f", f'"{"x" * PARSED_MAX}"')]),
    (HERMES, '<tool_call>{"name": "f", "name": "g.h", "arguments": {}, "arguments": {"a": 1}}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"n": [[1], "]"], "m": 5, "name": "f", "k": true}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> x', None, []),
    (HERMES, "<tool_call>", None, []),
    (HERMES, "a <tool_call>{} <tool", None, []),
    (HERMES, f"<tool_call>no\n{HERMES_F}", "<tool_call>no", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, '\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": null}', "", [("f", "{}")] * 2),
    (
        LLAMA3_JSON,
        '[{"parameters": {"a": 1}, "name": "f"}, {"name": "f", "parameters": {}}]',
        "",
        [
            ("f", '{"a": 1}'),
            ("f", "{}"),
        ],
    ),
    (LLAMA3_JSON, '{"name": "f", "age": 3}', None, []),
    (LLAMA3_JSON, '\n<|python_tag|>f.call(a="x")', None, []),
    (LLAMA3_JSON, "[1, 2]", None, []),
    (LLAMA3_JSON, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3_JSON, '{"name": "Ann", "parameters": 3}', None, []),
    (LLAMA3_JSON, 'It is {"name": "f", "parameters": {}}', None, []),
    (LLAMA3_JSON, "<|python", None, []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}, "id": "x"}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (MISTRAL, 'Sure. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] Done.', "Sure. Done.", [("f", '{"a": 1}')]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h{"b": 2}', "", [("f", '{"a": 1}'), ("g.h", '{"b": 2}')]),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (MISTRAL_ARGS, "[TOOL_CALLS]" * 2_000, None, []),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[" * 2_000, None, []),
    (MISTRAL_ARGS, '[TOOL_CALLS]nobody[ARGS]{"a": 1}', None, []),
    (
        PYTHONIC,
        "[f(a=1, b=\"x,)\", c=[1, (2)], d={'k': None}, e=True, h=false), g.h()]",
        "",
        [("f", '{"a": 1, "b": "x,)", "c": [1, 2], "d": {"k": null}, "e": true, "h": false}'), ("g.h", "{}")],
    ),
    (PYTHONIC, " [f(a='it\\'s', b=1e3,)] ", "", [("f", '{"a": "it\'s", "b": 1000.0}')]),
    (PYTHONIC, "[f(a=x + 1, b={1}, c=1e999)]", "", [("f", '{"a": "x + 1", "b": "{1}", "c": "1e999"}')]),
    (PYTHONIC, "[f(a=1)] and", "and", [("f", '{"a": 1}')]),
    (
        PYTHONIC,
        '[get-it(a=\'\', b="""x "quoted, )" y""", c=\'\\\\\')]',
        "",
        [
            ("get-it", '{"a": "", "b": "x \\"quoted, )\\" y", "c": "\\\\"}'),
        ],
    ),
    (PYTHONIC, f"[f(a=[{'1,' * 10_000}])]", "", [("f", json.dumps({"a": f"[{'1,' * 10_000}]"}))]),
    (PYTHONIC, f"[{'f' * 300}(a=1)]", None, []),
    (PYTHONIC, f"[f(a='{'x' * 20_000}')]", "", [("f", f'{{"a": "{"x" * 20_000}"}}')]),
    (PYTHONIC, f"[f(a={'(' * 1_000}{')' * 1_000})]", "", [("f", json.dumps({"a": "(" * 1_000 + ")" * 1_000}))]),
    (PYTHONIC, "[1, 2]", None, []),
    (PYTHONIC, "[nobody(a=1)]", None, []),
    (PYTHONIC, "f(a=1)", None, []),
]


@pytest.mark.parametrize(("tool_format", "answer", "text", "calls"), CASES)
def test_what_is_said_and_what_is_called(
    tool_format: ToolFormat, answer: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    """`text` None: all of it is text."""
    for size in (1, 2, 3, 7, 1000):
        found = read(tool_format, in_pieces(answer, size))
        assert (found.text, found.calls) == (answer if text is None else text, calls)
        assert found.ids == [f"id{number}" for number in range(len(calls))]


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool", "; ", ", ", "\n", " "),
        *(" " * 100, " " * 300),
        *("[", "]", "{", "}", '"name"', '"arguments"', '"parameters"', ":", '"f"', '"', "\\", "'", "(", ")", "a=", "1"),
        *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "f<arg_key>a</arg_key>", "<arg_value>"),
        *("</arg_value>", "<function=", "</tool_call", "<arg_key>a</arg_key>"),
        *("f", "f(", "g.h(", "text", "null", '{"name": "f", "arguments": {"a": 1}}', 'f[ARGS]{"a": 1}', "f(a=1)"),
    ]
)


@given(st.sampled_from(list(FORMATS.values())), st.lists(PARTS, max_size=25), st.data())
def test_however_it_is_cut_it_is_the_same_and_without_calls_it_is_text(
    tool_format: ToolFormat, parts: list[str], data: st.DataObject
) -> None:
    answer = "".join(parts)
    whole = read(tool_format, [answer])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    places = list(zip([0, *cuts], [*cuts, len(answer)], strict=True))
    assert read(tool_format, [answer[first:last] for first, last in places]) == whole
    assert read(tool_format, list(answer)) == whole
    if not whole.calls:
        assert whole.text == answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), JSON, max_size=4)


@given(
    st.sampled_from([each for each in FORMATS.values() if each.is_json]),
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 9),
)
def test_calls_are_read_as_they_are_written(
    tool_format: ToolFormat, wanted: list[tuple[str, dict[str, object]]], is_ascii: bool, size: int
) -> None:
    calls = [ToolCall("", name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in wanted]
    answer = written(tool_format, calls)
    found = read(tool_format, in_pieces(answer, size))
    assert found.text == ""
    assert found.calls == [(call.name, call.arguments) for call in calls], "as the model wrote them"


XML_ARGUMENT = {
    "qwen3_coder": "<parameter=a>\n1\n</parameter>\n",
    "glm45": "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
}
PYTHON_NAMES = st.sampled_from(["a", "b2", "long_name"])


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(PYTHON_NAMES, JSON)), min_size=1, max_size=3))
def test_python_literals_become_json(wanted: list[tuple[str, dict[str, object]]]) -> None:
    calls = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in wanted)
    found = read(PYTHONIC, list(f"[{', '.join(calls)}]"))
    assert found.text == ""
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == wanted


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_texts_and_calls_come_in_the_order_in_which_they_were_written(size: int) -> None:
    answer = f"One {HERMES_F} two {HERMES_F}{HERMES_F} three"
    found = read(HERMES, in_pieces(answer, size))
    assert found.order == ["One", 0, " two", 1, 2, " three"]


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda each: each.name)
def test_after_as_many_calls_as_there_may_be_the_answer_is_over(tool_format: ToolFormat) -> None:
    calls = [ToolCall("", "f", '{"a": 1}')] * 3
    if tool_format.xml is not None:
        calls = [ToolCall("", "f", XML_ARGUMENT[tool_format.name])] * 3
    answer = "[f(a=1), f(a=1), f(a=1)]" if tool_format.is_python else written(tool_format, calls)
    for size in (1, 1000):
        found = read(tool_format, in_pieces(answer, size), calls_max=2)
        assert (found.text, found.calls, found.is_done) == ("", [("f", '{"a": 1}')] * 2, True)
        parser = parser_of(tool_format, calls_max=1)
        for piece in (answer, answer):
            parser.feed(piece)
        parser.flush()
        assert len(taken(parser)[1]) == 1
    assert not read(tool_format, [answer], calls_max=4).is_done


def test_a_stream_tells_a_call_as_it_comes() -> None:
    parser = parser_of(HERMES)
    told = []
    for piece in ('<tool_call>{"name": "f', '", "arg', 'uments": {"a', '": 1', "}}</tool_call>"):
        parser.feed(piece)
        told.append([(delta.name, delta.arguments) for delta in taken(parser)[1]])
    assert told == [[], [("f", "")], [("", '{"a')], [("", '": 1')], [("", "}")]]


@pytest.mark.parametrize(
    ("tool_format", "answer", "text", "calls"),
    [
        (HERMES, 'Yes. <tool_call>\n{"na', "Yes.", []),
        (HERMES, "Yes. <tool_call>", "Yes.", []),
        (HERMES, "Yes. <tool_", "Yes. <tool_", []),
        (HERMES, f"{HERMES_F}\n<tool_", "", [("f", '{"a": 1}')]),
        (HERMES, HERMES_F.removesuffix("tool_call>"), "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f"', "", [("f", "")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a', "", [("f", "")]),
        (HERMES, "Not <tool_call> so", "Not <tool_call> so", []),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[AR", "", []),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
        (LLAMA3_JSON, '{"name": "f", "param', '{"name": "f", "param', []),
        (LLAMA3_JSON, '{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
        (LLAMA3_JSON, '{"na', '{"na', []),
        (PYTHONIC, '[f(a=1, b="x', "", [("f", '{"a": 1')]),
        (PYTHONIC, "[f(a=1, b", "", [("f", '{"a": 1')]),
        (PYTHONIC, "[f(", "", [("f", "")]),
    ],
)
def test_an_answer_that_was_cut_has_no_rest_of_an_opening_and_no_call_that_looks_complete(
    tool_format: ToolFormat, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 3, 1000):
        found = read(tool_format, in_pieces(answer, size), was_cut=True)
        assert (found.text, found.calls) == (text, calls)
        assert found.is_open == bool(calls and not calls[0][1].endswith("}"))


def test_a_forced_answer_has_no_text() -> None:
    parser = JsonCalls(HERMES, NAMES, lambda: "id", is_forced=True)
    parser.feed('<tool_call>\n{"na')
    parser.flush()
    assert not parser.take()


@pytest.mark.parametrize(
    ("tool_format", "opening"),
    [
        (HERMES, ""),
        (HERMES, HERMES_F),
        (HERMES, HERMES_F[:-13]),
        (HERMES, HERMES_F[:-14]),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"name"'),
        (LLAMA3_JSON, ""),
    ],
)
def test_white_space_without_end_is_text_soon(tool_format: ToolFormat, opening: str) -> None:
    parser = parser_of(tool_format)
    parser.feed(opening)
    for _ in range(4 * SPACE_MAX):
        parser.feed(" ")
    assert len(taken(parser)[0]) > SPACE_MAX
    parser.feed("x")
    assert "x" in taken(parser)[0]


def test_what_waits_is_bounded() -> None:
    parser = parser_of(HERMES)
    parser.feed('<tool_call>{"first": "')
    for _ in range(2 + HELD_MAX // 10_000):
        parser.feed("x" * 10_000)
    assert len(taken(parser)[0]) > HELD_MAX
    parser.feed("more")
    assert taken(parser)[0] == "more"


@pytest.mark.parametrize(
    ("tool_format", "answer"),
    [
        (HERMES, r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>'),
        (PYTHONIC, r'[f(a="\ud800")]'),
    ],
)
def test_half_of_a_surrogate_pair_is_replaced(tool_format: ToolFormat, answer: str) -> None:
    ((_, arguments),) = read(tool_format, [answer]).calls
    assert "\ufffd" in arguments


def test_text_waits_for_nothing_but_what_may_open_a_call() -> None:
    parser = parser_of(HERMES)
    told = []
    for piece in ("One ", "two <", "b> <tool_", "bar ", " " * 300, "x"):
        parser.feed(piece)
        told.append(taken(parser)[0])
    assert told == ["One", " two", " <b>", " <tool_bar", " " * (301 - SPACE_MAX), " " * SPACE_MAX + "x"]
