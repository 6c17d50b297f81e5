"""Grammars of answers that call tools: they let through what a family writes, and nothing that does not parse."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from coppice.grammar import GrammarError, Grammars, Matcher
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of
from coppice_scheduler.edge.text.tools.call_grammar import (
    calls_grammar,
    format_for_grammar,
    text_grammar,
    what_is_wrong,
)
from coppice_scheduler.edge.text.tools.call_parser import CallDelta
from coppice_scheduler.edge.text.tools.formats import FORMATS, HERMES, MARKERS, ToolFormat
from coppice_scheduler.edge.text.tools.json_calls import JsonCalls
from coppice_scheduler.edge.text.tools.tool import Tool, ToolCall, ToolMode, ToolUse
from tests.fakes.api.rest import DEMO
from tests.fakes.api.written_calls import written

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get_weather", json.dumps(CITY)), Tool("now", json.dumps(NONE)))
NAMES = frozenset({"get_weather", "now"})
REQUIRED = ToolUse(TOOLS, ToolMode.REQUIRED, NAMES)
ONE = ToolUse(TOOLS, ToolMode.REQUIRED, frozenset({"get_weather"}), 1)
STRICT = ToolUse((Tool("get_weather", json.dumps(CITY), is_strict=True), TOOLS[1]), ToolMode.AUTO, NAMES)
CALLS = [ToolCall("", "get_weather", '{"city": "Ulm"}'), ToolCall("", "now", "{}")]
EOS = 0


class Vocabulary:
    """The demo model's, with the markers of all families as tokens or without."""

    def __init__(self, has_markers: bool) -> None:
        self.raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        if has_markers:
            self.raw.add_special_tokens(list(MARKERS))
        self.size = self.raw.get_vocab_size(with_added_tokens=True)
        self.grammars = Grammars(self.raw.to_str(), self.size, {EOS})

    def matcher(self, grammar: str) -> Matcher:
        return self.grammars.compile(grammar_of(OutputFormat(FormatKind.TOOL_CALLS, grammar, "tools")))

    def takes(self, grammar: str, text: str) -> bool:
        """Whether it may be a whole answer."""
        matcher = self.matcher(grammar)
        try:
            matcher.take(np.array([*self.raw.encode(text, add_special_tokens=False).ids, EOS], np.uint32))
        except GrammarError:
            return False
        return True

    def random_answer(self, grammar: str, rng: random.Random, ends: tuple[str, ...] = ()) -> str:
        """`ends`: what ends a text that may be of any length, and which chance alone would hardly write."""
        matcher, ids = self.matcher(grammar), []
        words = np.zeros((self.size + 31) // 32, np.uint32)
        begun: list[int] = []  # what is left of an end
        while len(ids) < 4000:
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: self.size])
            if EOS in allowed and len(ids) > 60:
                break
            if not begun and ends and rng.random() < 0.1:
                begun = self.raw.encode(rng.choice(ends), add_special_tokens=False).ids
            if begun and begun[0] not in allowed:
                begun = []
            token = begun.pop(0) if begun else int(rng.choice(allowed.tolist()))
            if token == EOS:
                break
            ids.append(token)
            matcher.take(np.array([token], np.uint32))
        else:
            pytest.fail("an answer does not come to its end")
        return self.raw.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module", params=[True, False], ids=["markers", "letters"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


@pytest.fixture(params=FORMATS.values(), ids=lambda each: each.name)
def tool_format(request: pytest.FixtureRequest) -> ToolFormat:
    return format_for_grammar(REQUIRED, request.param)


def test_forced_calls_are_written_as_the_family_writes_them(vocabulary: Vocabulary, tool_format: ToolFormat) -> None:
    several = calls_grammar(REQUIRED, tool_format, vocabulary.raw.token_to_id)
    assert vocabulary.takes(several, written(tool_format, CALLS))
    assert vocabulary.takes(several, written(tool_format, CALLS[1:]))
    one = calls_grammar(ONE, tool_format, vocabulary.raw.token_to_id)
    assert vocabulary.takes(one, written(tool_format, CALLS[:1]))
    for wrong in ([], CALLS[1:], [CALLS[0], CALLS[0]], [ToolCall("", "get_weather", "{}")]):
        assert not vocabulary.takes(one, written(tool_format, wrong))
    for text in ("", "Hello", f"So: {written(tool_format, CALLS[:1])}"):
        assert not vocabulary.takes(several, text)
    for arguments in ('{"city":"Ulm"}', '{"city":  "Ulm"}', '{ "city": "Ulm"}', '{"city":\n"Ulm"}', '{"city": "Ulm" }'):
        assert not vocabulary.takes(several, written(tool_format, [ToolCall("", "get_weather", arguments)])), (
            "no template writes it so"
        )


def test_with_strict_tools_text_is_free_and_calls_follow_the_schema(
    vocabulary: Vocabulary, tool_format: ToolFormat
) -> None:
    grammar = text_grammar(STRICT, tool_format, vocabulary.raw.token_to_id)
    for text in ("", "Hello there <b>!\n", "1 [2] 3", "<|py", written(tool_format, CALLS)):
        assert vocabulary.takes(grammar, text), text
    for call in (ToolCall("", "get_weather", '{"town": "Ulm"}'), ToolCall("", "nobody", "{}")):
        assert not vocabulary.takes(grammar, written(tool_format, [call]))
        for opening in (" ", "[", "\x1c", "<|python_tag|>"):
            assert not vocabulary.takes(grammar, opening + written(tool_format, [call]))
    if tool_format.opens:
        assert vocabulary.takes(grammar, f"I look.\n{written(tool_format, CALLS)}\n\nDone.")
        assert not vocabulary.takes(grammar, f"I look {tool_format.opens} there")


def test_calls_or_an_answer_in_a_form(vocabulary: Vocabulary) -> None:
    grammar = calls_grammar(REQUIRED, HERMES, vocabulary.raw.token_to_id, '{"type": "boolean"}')
    assert vocabulary.takes(grammar, written(HERMES, CALLS))
    assert vocabulary.takes(grammar, "true")
    assert not vocabulary.takes(grammar, "Hello")
    assert not vocabulary.takes(grammar, f"true{written(HERMES, CALLS)}")
    with pytest.raises(GrammarError, match="not"):
        vocabulary.matcher(calls_grammar(REQUIRED, HERMES, vocabulary.raw.token_to_id, '{"not": {"type": "null"}}'))


def test_whatever_is_drawn_parses(vocabulary: Vocabulary, tool_format: ToolFormat) -> None:
    grammar = calls_grammar(REQUIRED, tool_format, vocabulary.raw.token_to_id)
    validators = {tool.name: jsonschema_rs.validator_for(json.loads(tool.parameters)) for tool in TOOLS}
    for seed in range(8):
        parser = JsonCalls(tool_format, NAMES, lambda: "id")
        parser.feed(vocabulary.random_answer(grammar, random.Random(seed)))
        parser.flush()
        calls: dict[int, list[str]] = {}
        for delta in parser.take():
            assert isinstance(delta, CallDelta)
            calls.setdefault(delta.index, []).extend([delta.name] if delta.name else [])
            calls[delta.index].append(delta.arguments)
        assert calls
        for name, *arguments in calls.values():
            validators[name].validate(json.loads("".join(arguments)))


def test_functions_take_the_arguments_that_they_name(vocabulary: Vocabulary) -> None:
    def takes(schema: dict[str, Any], arguments: str) -> bool:
        use = ToolUse((Tool("f", json.dumps(schema)),), ToolMode.REQUIRED, frozenset({"f"}))
        grammar = calls_grammar(use, HERMES, vocabulary.raw.token_to_id)
        return vocabulary.takes(grammar, written(HERMES, [ToolCall("", "f", arguments)]))

    assert takes({}, "{}")
    assert not takes({}, '{"a": 1}')
    assert not takes({"properties": {"b": {}}}, '{"a": 1}')
    assert takes({"properties": {"b": {}}, "additionalProperties": True}, '{"a": 1}')
    assert takes({"$defs": {"x": {"properties": {"a": {}}}}, "$ref": "#/$defs/x"}, '{"a": 1}')


def test_a_name_is_written_in_one_way_and_counts_once(vocabulary: Vocabulary) -> None:
    def grammar(schema: dict[str, Any]) -> str:
        use = ToolUse((Tool("f", json.dumps(schema), is_strict=True),), ToolMode.REQUIRED, frozenset({"f"}))
        return calls_grammar(use, HERMES, vocabulary.raw.token_to_id)

    def takes(schema: dict[str, Any], arguments: str) -> bool:
        return vocabulary.takes(grammar(schema), written(HERMES, [ToolCall("", "f", arguments)]))

    any_others = {"properties": {"a": {"type": "null"}}, "additionalProperties": True}
    assert takes(any_others, '{"a": null, "b": 1}')
    assert not takes(any_others, '{"\\u0061": 1}')
    with pytest.raises(GrammarError, match="parameters of f: minProperties may be 1 at most"):
        grammar({"properties": {}, "additionalProperties": True, "minProperties": 2})


def test_the_tool_is_found_that_the_library_complains_of(vocabulary: Vocabulary) -> None:
    tools = (*TOOLS, Tool("wrong", '{"properties": {"a": {"type": "foo"}}}'))
    use = ToolUse(tools, ToolMode.REQUIRED, frozenset({"now", "wrong"}))
    grammar = calls_grammar(use, HERMES, vocabulary.raw.token_to_id)
    with pytest.raises(GrammarError) as caught:
        vocabulary.matcher(grammar)
    place, problem = what_is_wrong(grammar, str(caught.value))
    assert place == 2
    assert "foo" in problem
    assert "call_" not in problem
    assert what_is_wrong(grammar, "other words") == (None, "other words")


def test_what_says_nothing_about_values_does_not_count_against_the_limit(vocabulary: Vocabulary) -> None:
    schema = {"description": "x" * 5_000, "properties": {"a": {"type": "string", "description": "y" * 5_000}}}
    tools = tuple(Tool(f"f{number}", json.dumps(schema)) for number in range(50))
    use = ToolUse(tools, ToolMode.REQUIRED, frozenset(tool.name for tool in tools))
    vocabulary.matcher(calls_grammar(use, HERMES, vocabulary.raw.token_to_id))


def test_keywords_that_the_library_does_not_know_are_refused_of_strict_tools_alone(vocabulary: Vocabulary) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    for is_strict in (False, True):
        use = ToolUse((Tool("f", schema, is_strict=is_strict),), ToolMode.REQUIRED, frozenset({"f"}))
        grammar = calls_grammar(use, HERMES, vocabulary.raw.token_to_id)
        if is_strict:
            with pytest.raises(GrammarError, match="not"):
                vocabulary.matcher(grammar)
        else:
            assert vocabulary.takes(grammar, written(HERMES, [ToolCall("", "f", '{"a": 1}')]))
