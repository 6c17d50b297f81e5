"""Chats of `coppice.LLM` with tools and with reasoning: as over REST."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coppice import LLM, Generation, Piece, SamplingOptions
from coppice.errors import UsageError
from tests.fakes.checkpoints import write_tiny_checkpoint

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% if tools %}Write <tool_call>...</tool_call>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{% endfor %}<|assistant|>"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}<|assistant|>{% if is_open %}<think>{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"}, "day": {"enum": ["today", "tomorrow"]}},
    "required": ["name", "day"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "City", "description": "The weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "Now", "parameters": NOTHING}},
]
WRONG = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}}
NAMED = {"type": "function", "function": {"name": "City"}}
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
USER = {"role": "user", "content": "How is it?"}
OPTIONS = SamplingOptions(max_tokens=1500, temperature=1.2, seed=3)


@contextmanager
def llm_of(folder: Path, template: str) -> Iterator[LLM]:
    path = write_tiny_checkpoint(folder / "tiny", "qwen2", seed=6)
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS)
    tokenizer.save(str(path / "tokenizer.json"))
    with LLM(path, num_blocks=512, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with llm_of(tmp_path_factory.mktemp("tools"), TEMPLATE) as llm:
        yield llm


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with llm_of(tmp_path_factory.mktemp("thinking"), THINKING) as llm:
        yield llm


def is_city(arguments: str) -> bool:
    said = json.loads(arguments)
    return set(said) == {"name", "day"} and said["day"] in ("today", "tomorrow") and said["name"].istitle()


def same(generation: Generation, pieces: list[Piece]) -> None:
    """Pieces of the first continuation make its completion."""
    (output,) = generation.outputs
    assert "".join(piece.text for piece in pieces) == output.text
    assert "".join(piece.reasoning for piece in pieces) == output.reasoning
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert pieces[-1].finish_reason == output.finish_reason
    parts = [part for piece in pieces for part in piece.tool_calls]
    assert [part.name for part in parts if part.name] == [call.name for call in output.tool_calls]
    for place, call in enumerate(output.tool_calls):
        assert "".join(part.arguments for part in parts if part.index == place) == call.arguments


def test_a_named_tool_is_called_once(llm: LLM) -> None:
    (generation,) = llm.chat([USER], SamplingOptions(max_tokens=1500, seed=1, n=3), tools=TOOLS, tool_choice=NAMED)
    for output in generation.outputs:
        (call,) = output.tool_calls
        assert call.id
        assert call.name == "City"
        assert is_city(call.arguments)
        assert (output.text, output.finish_reason) == ("", "tool_calls")
    llm.check()


def test_calls_that_are_sent_back_become_the_tokens_that_the_model_wrote(llm: LLM) -> None:
    messages: list[Any] = [USER]
    history: list[int] = []
    for seed in range(4):
        asked = SamplingOptions(max_tokens=1500, seed=seed, temperature=1.2)
        (generation,) = llm.chat([messages], asked, tools=TOOLS, tool_choice=NAMED)
        assert generation.prompt_token_ids[: len(history)] == history
        history = [*generation.prompt_token_ids, *generation.token_ids]
        (call,) = generation.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        messages = [
            *messages,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
    llm.check()


def test_required_calls_are_streamed_and_the_same(llm: LLM) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        asked = SamplingOptions(max_tokens=1500, seed=seed, temperature=1.0)
        (generation,) = llm.chat([USER], asked, **options)
        (call,) = generation.tool_calls
        assert call.name == "Now" or is_city(call.arguments)
        with llm.stream_chat([USER], asked, **options) as stream:
            same(generation, list(stream))
            assert stream.generation.tool_calls[0].arguments == call.arguments
    llm.check()


def test_a_conversation_goes_on_with_calls_and_results(llm: LLM) -> None:
    messages: list[Any] = [USER]
    before = 0
    for seed in range(4):
        asked = SamplingOptions(max_tokens=1500, seed=seed, temperature=1.0)
        (generation,) = llm.chat(messages, asked, tools=TOOLS, tool_choice=NAMED)
        assert generation.usage.cached_tokens >= before // 16 * 16
        (call,) = generation.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": f"rain {seed}"}
        messages += [generation.outputs[0].as_message(), result]
        before = generation.usage.prompt_tokens
    assert generation.prompt is not None
    assert generation.prompt.count("<tool_call>\n") == 3
    assert "rain 2" in generation.prompt


def test_tools_that_must_not_be_called_are_not(llm: LLM) -> None:
    (generation,) = llm.chat([USER], OPTIONS, tools=TOOLS, tool_choice="none")
    assert generation.prompt is not None
    assert generation.prompt.startswith("City Now")
    assert generation.tool_calls == ()
    assert "<tool_call>" not in generation.text


def token_of(llm: LLM, text: str) -> int:
    (generation,) = llm.generate(text, SamplingOptions(max_tokens=1))
    (token_id,) = generation.prompt_token_ids
    return token_id


def test_the_token_that_opens_calls_is_forbidden_whatever_was_asked(llm: LLM) -> None:
    opens = token_of(llm, "<tool_call>")
    wanted = SamplingOptions(max_tokens=20, seed=1, logit_bias={opens: 100})
    (free,) = llm.chat([USER], wanted)
    (bound,) = llm.chat([USER], wanted, tools=TOOLS, tool_choice="none")
    assert opens in free.token_ids
    assert opens not in bound.token_ids


def test_reasoning_ends_at_a_token_that_is_no_text(thinking: LLM) -> None:
    closes = token_of(thinking, "</think>")
    wanted = SamplingOptions(
        max_tokens=300, structured_outputs={"choice": ["left", "right"]}, logit_bias={closes: 9}, seed=2
    )
    (generation,) = thinking.chat([USER], wanted, chat_template_kwargs={"is_open": True})
    assert closes in generation.token_ids
    assert generation.text in ("left", "right")
    assert "think>" not in generation.reasoning
    same(generation, list(thinking.stream_chat([USER], wanted, chat_template_kwargs={"is_open": True})))


def test_reasoning_is_no_part_of_the_text(thinking: LLM) -> None:
    wanted = SamplingOptions(max_tokens=200, structured_outputs={"choice": ["left", "right"]}, seed=2)
    thought = SamplingOptions(max_tokens=300, seed=2, temperature=0.8, logit_bias={ord("<"): 8})
    for options in (wanted, thought):
        values = {"is_open": True}
        (generation,) = thinking.chat([USER], options, chat_template_kwargs=values)
        assert generation.reasoning
        assert generation.usage.reasoning_tokens > 0
        assert generation.text in ("left", "right", "") or options is thought
        same(generation, list(thinking.stream_chat([USER], options, chat_template_kwargs=values)))
    (generation,) = thinking.chat([USER], wanted)
    assert generation.text in ("left", "right")


def test_reasoning_is_sent_back_with_the_answer(thinking: LLM) -> None:
    (generation,) = thinking.chat([USER], SamplingOptions(max_tokens=9, seed=2), chat_template_kwargs={"is_open": True})
    (again,) = thinking.chat([USER, generation.outputs[0].as_message(), USER], OPTIONS)
    assert again.prompt is not None
    assert f"<think>{generation.reasoning}</think>" in again.prompt


def test_a_prompt_that_is_no_chat_has_neither(thinking: LLM) -> None:
    (generation,) = thinking.generate("a <think>", SamplingOptions(max_tokens=40, seed=2))
    assert (generation.reasoning, generation.tool_calls, generation.usage.reasoning_tokens) == ("", (), 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": "City"}, "tools must be a list of tools"),
        ({"tools": [CITY]}, r"tools\[0\]"),
        ({"tools": [*TOOLS, TOOLS[0]]}, r"tools\[2\].function.name is that of another tool"),
        ({"tools": TOOLS, "tool_choice": "King"}, "tool_choice must be none, auto"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice must be none, auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "King"}}}, "none of the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
        ({"tools": TOOLS, "tool_choice": NAMED, "params": SamplingOptions(ignore_eos=True)}, "leave out ignore_eos"),
        (
            {"tools": TOOLS, "tool_choice": "auto", "params": SamplingOptions(structured_outputs={"regex": "a"})},
            "cannot be combined with structured_outputs",
        ),
        ({"tools": [WRONG], "tool_choice": "required"}, "^tools cannot be used"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(llm: LLM, options: dict[str, Any], named: str) -> None:
    ask: list[Callable[..., Any]] = [llm.chat, llm.stream_chat]
    for call in ask:
        with pytest.raises(UsageError, match=named):
            call([USER], **options)


def test_a_template_that_reads_no_tools_is_told(tmp_path: Path) -> None:
    with (
        LLM(write_tiny_checkpoint(tmp_path / "tiny"), num_blocks=64, threads=1) as plain,
        pytest.raises(UsageError, match="does not read tools"),
    ):
        plain.chat([USER], tools=TOOLS)
