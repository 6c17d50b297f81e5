"""Where the prompt of a chat ends: `add_generation_prompt` and `continue_final_message`, as in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coppice import LLM, SamplingOptions
from coppice.errors import UsageError
from tests.unit.tools.offline.test_offline_tools import NAMED, TEMPLATE, THINKING, TOOLS, USER, llm_of

GREEDY = SamplingOptions(max_tokens=8, temperature=0, ignore_eos=True)
BEGUN = [USER, {"role": "assistant", "content": " It is "}]
CALL = {"id": "c", "type": "function", "function": {"name": "City", "arguments": "{}"}}
FORM = SamplingOptions(max_tokens=8, structured_outputs={"regex": "[ab]{3}"})
WITHIN = {"continue_final_message": True}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with llm_of(tmp_path_factory.mktemp("ends"), THINKING) as llm:
        yield llm


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with llm_of(tmp_path_factory.mktemp("ends"), TEMPLATE) as llm:
        yield llm


@pytest.mark.parametrize("chat", [[USER], BEGUN], ids=["a question", "an answer that has begun"])
@pytest.mark.parametrize(
    "ends",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["answer", "last message", "within"],
)
def test_prompts_end_as_in_transformers(llm: LLM, checkpoint: Path, ends: dict[str, Any], chat: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    expected = tokenizer.apply_chat_template(chat, **ends)["input_ids"]
    (generation,) = llm.chat(chat, GREEDY, **ends)
    assert generation.prompt_token_ids == expected
    stream = llm.stream_chat(chat, GREEDY, **ends)
    assert "".join(piece.text for piece in stream) == generation.text
    assert stream.generation.prompt_token_ids == expected
    assert llm.generate([expected], GREEDY)[0].token_ids == generation.token_ids


def test_without_a_word_an_answer_begins_and_one_that_goes_on_does_not(llm: LLM) -> None:
    plain, answer, within, closed = (
        llm.chat([BEGUN, BEGUN], GREEDY, **ends)
        for ends in ({}, {"add_generation_prompt": True}, WITHIN, {**WITHIN, "add_generation_prompt": False})
    )
    assert [each.prompt for each in plain] == [each.prompt for each in answer]
    assert [each.prompt for each in within] == [each.prompt for each in closed]
    assert within[0].prompt != plain[0].prompt
    assert within[0].prompt is not None
    assert within[0].prompt.endswith("It is") or within[0].prompt.endswith("It is ")


@pytest.mark.parametrize(
    ("content", "is_open"), [("<think>Hm", True), ("<think>Hm</think>It", False), ("It", False)], ids=str
)
def test_what_goes_on_within_reasoning_is_reasoning(thinking: LLM, content: str, is_open: bool) -> None:
    chat = [USER, {"role": "assistant", "content": content}]
    (generation,) = thinking.chat(chat, GREEDY, continue_final_message=True)
    assert (bool(generation.reasoning), bool(generation.text)) == (is_open, not is_open)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.chat(BEGUN, **WITHIN, add_generation_prompt=True), "add_generation_prompt cannot be true"),
        (lambda llm: llm.stream_chat(BEGUN, **WITHIN, add_generation_prompt=True), "add_generation_prompt cannot be"),
        (lambda llm: llm.chat(BEGUN, continue_final_message="yes"), "continue_final_message is 'yes'; it must be True"),
        (lambda llm: llm.chat(BEGUN, continue_final_message=None), "continue_final_message is None; it must be True"),
        (lambda llm: llm.chat(BEGUN, add_generation_prompt=0), "add_generation_prompt is 0; it must be True or False"),
        (lambda llm: llm.chat(BEGUN, FORM, **WITHIN), "structured_outputs.regex cannot be had of an answer"),
        (lambda llm: llm.stream_chat(BEGUN, FORM, **WITHIN), "structured_outputs.regex cannot be had of an answer"),
        (lambda llm: llm.chat(BEGUN, **WITHIN, tools=TOOLS, tool_choice=NAMED), "cannot be had of an answer that goes"),
        (lambda llm: llm.chat([USER, {"role": "assistant", "tool_calls": [CALL]}], **WITHIN), "calls tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(calling: LLM, ask: Callable[[LLM], Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ask(calling)
    assert len(calling.chat(BEGUN, FORM)[0].text) == 3
