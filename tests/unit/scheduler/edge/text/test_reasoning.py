"""What a model thinks, apart from what it says; and grammars whose answer comes behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coppice.grammar import GrammarError, Grammars
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.text.answer_syntax import AnswerSyntax
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of
from coppice_scheduler.edge.text.reasoning.formats import MISTRAL_THINK, REASONING_FORMATS, REASONING_MARKERS, THINK
from coppice_scheduler.edge.text.reasoning.grammar import BehindReasoning
from coppice_scheduler.edge.text.reasoning.parser import ReasoningParser
from coppice_up.options import REASONING_PARSERS
from tests.fakes.api.rest import DEMO

EOS = 0


def read(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(THINK, is_open=is_open)
    found = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


@pytest.mark.parametrize(
    ("answer", "is_open", "reasoning", "text"),
    [
        ("<think>\nLet me  see. \n</think>\n\nYes. ", False, "Let me  see.", "Yes. "),
        (" \n<think>x</think>y", False, "x", "y"),
        ("x\n</think> y", True, "x", "y"),
        ("<think></think>\n", False, "", ""),
        ("<think>never closed \n", False, "never closed", ""),
        ("never closed</thin", True, "never closed</thin", ""),
        ("No. <think>x</think>", False, "", "No. <think>x</think>"),
        ("x</think>", False, "", "x</think>"),
        ("<think>x</think>a <think>b</think>", False, "x", "a <think>b</think>"),
        (" \n ", False, "", " \n "),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_answer(answer: str, is_open: bool, reasoning: str, text: str) -> None:
    for size in (1, 2, 5, 1000):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert read(pieces, is_open=is_open) == (reasoning, text)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", " ", "\n", "word", "<"]), max_size=12),
    st.booleans(),
    st.integers(1, 9),
)
def test_however_it_is_cut_it_is_the_same(parts: list[str], is_open: bool, size: int) -> None:
    answer = "".join(parts)
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert read(pieces, is_open=is_open) == read([answer], is_open=is_open)


def test_text_is_told_as_it_comes() -> None:
    parser = ReasoningParser(THINK, is_open=False)
    told = [parser.feed(piece) for piece in ("<thi", "nk>\nOne", " two <", "b>", "</th", "ink>", "\n", "\nYes", " no")]
    said = [("", "")] * 3 + [("", "Yes"), ("", " no")]
    assert told == [("", ""), ("One", ""), (" two", ""), (" <b>", ""), *said]


def test_formats_are_those_of_templates_or_of_the_operator() -> None:
    def syntax(template: str | None, parser: str = "auto") -> AnswerSyntax:
        checkpoint = replace(load_checkpoint_text(DEMO), chat_template=template)
        return AnswerSyntax(checkpoint, ChatTemplate(checkpoint), reasoning_parser=parser)

    assert syntax("{{ '<think>' }}").reasoning is THINK
    assert syntax("{{ '[THINK]' }}").reasoning is MISTRAL_THINK
    assert syntax("plain").reasoning is None
    assert syntax(None).reasoning is None
    assert syntax("plain", "think").reasoning is THINK
    assert syntax("{{ '<think>' }}", "none").reasoning is None
    offered = get_args(ServiceSettings.model_fields["reasoning_parser"].annotation)
    assert set(offered) == set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}
    assert syntax("{{ '<think>' }}").parts(None, None) is None, "what is no chat has none"
    assert syntax("plain").parts(None, False) is None


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("a <think>\n", True), ("a <think>\n\n</think>\n\n", False), ("<think> a", False), ("", False)],
)
def test_a_template_may_open_it(prompt: str, is_open: bool) -> None:
    assert THINK.is_open_after(prompt) == is_open


@pytest.mark.parametrize("has_markers", [True, False], ids=["markers", "letters"])
@pytest.mark.parametrize(
    "form",
    [
        OutputFormat(FormatKind.JSON, '{"type": "boolean"}', "x"),
        OutputFormat(FormatKind.REGEX, "true", "x"),
        OutputFormat(FormatKind.CHOICE, ("true", "maybe"), "x"),
        OutputFormat(FormatKind.GRAMMAR, 'start: "true"', "x"),
        OutputFormat(FormatKind.TOOL_CALLS, 'start: "true"', "x"),
    ],
    ids=lambda form: str(form.kind),
)
def test_a_form_is_that_of_the_answer_behind_it(form: OutputFormat, has_markers: bool) -> None:
    raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if has_markers:
        raw.add_tokens(list(REASONING_MARKERS))
    grammars = Grammars(raw.to_str(), raw.get_vocab_size(with_added_tokens=True), {EOS})

    def takes(text: str, *, is_open: bool) -> bool:
        behind = BehindReasoning.of(THINK, raw.token_to_id, is_open=is_open)
        matcher = grammars.compile(grammar_of(replace(form, behind=behind)))
        try:
            matcher.take(np.array([*raw.encode(text, add_special_tokens=False).ids, EOS], np.uint32))
        except GrammarError:
            return False
        return True

    assert takes("Let me see: no.\n</think>\n\ntrue", is_open=True)
    assert takes("<think>\nLet me see: no.\n</think>\n\ntrue", is_open=False)
    assert takes("true", is_open=False)
    for wrong in ("x</think>no", "x", "</think>true</think>"):
        assert not takes(wrong, is_open=True)
    for wrong in ("<think>x</think>no", "<think>x", "x</think>true", "no"):
        assert not takes(wrong, is_open=False)


@pytest.mark.parametrize(
    ("message", "is_open"),
    [
        ("", False),
        ("<think>let me", True),
        ("<think>so</think> It", False),
        ("the tag <think> opens", False),
        ("It is", False),
    ],
)
def test_an_answer_that_goes_on_within_a_thought_is_still_thinking(message: str, is_open: bool) -> None:
    assert THINK.is_open_within(message) == is_open
