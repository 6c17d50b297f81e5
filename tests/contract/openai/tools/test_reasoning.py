"""Reasoning over REST and to the programs that read it; the engine says what such a model would have said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.fakes.api.engine import unpack
from tests.fakes.api.rest import DEMO, MODEL, Served, error_of, events_of, serving

# As Qwen 3's: thinking may be switched off, which closes it at once.
SWITCH = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# As DeepSeek R1's.
OPEN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
USER: dict[str, Any] = {"role": "user", "content": "Is it?"}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@contextmanager
def with_template(template: str) -> Iterator[Served]:
    with serving(checkpoint=replace(load_checkpoint_text(DEMO), chat_template=template)) as served:
        yield served


@pytest.fixture(scope="module")
def switch() -> Iterator[Served]:
    with with_template(SWITCH) as served:
        yield served


def ask(served: Served, says: str, **fields: Any) -> Any:
    served.says(says)
    options: Any = {"model": MODEL, "messages": [USER], "max_tokens": 200, **fields}
    return served.client().chat.completions.create(**options)


def test_reasoning_has_fields_of_its_own(switch: Served) -> None:
    answer = ask(switch, f"{THOUGHT}Yes.")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Yes.", "Let me see.", "Let me see.")
    thought = len(switch.ids("<think>\nLet me see.\n</think>"))
    assert 0 < thought - answer.usage.completion_tokens_details.reasoning_tokens <= 8, "the marker is no token here"
    plain = ask(switch, "Yes.")
    assert plain.choices[0].message.content == "Yes."
    assert not hasattr(plain.choices[0].message, "reasoning")
    assert plain.usage.completion_tokens_details is None


@pytest.mark.parametrize("tokens_per_output", [1, 4, 100])
def test_a_stream_has_it_apart(switch: Served, tokens_per_output: int) -> None:
    switch.says(f"{THOUGHT}Yes.", tokens_per_output=tokens_per_output)
    fields: dict[str, Any] = {"stream": True, "max_tokens": 200, "logprobs": True, "return_token_ids": True}
    *chunks, _ = events_of(switch.chat(**fields).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert "".join(entry["token"] for entry in entries) == f"{THOUGHT}Yes.", "of all tokens"


def test_it_is_not_shown_to_who_does_not_want_it(switch: Served) -> None:
    switch.says(f"{THOUGHT}Yes.")
    answer = switch.chat(include_reasoning=False, max_tokens=200).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    streamed = switch.chat(include_reasoning=False, max_tokens=200, stream=True).text
    assert "see" not in streamed
    assert error_of(switch.chat(include_reasoning="no"), 400)["param"] == "include_reasoning"


def test_a_prompt_may_end_within_it_or_behind_it(switch: Served) -> None:
    with with_template(OPEN) as open_:
        message = ask(open_, "Let me see.\n</think>\n\nYes.").choices[0].message
        assert (message.content, message.reasoning) == ("Yes.", "Let me see.")
        message = ask(open_, "Let me see").choices[0].message
        assert (message.content, message.reasoning) == ("", "Let me see")
    message = ask(switch, "Yes.", extra_body={"enable_thinking": False}).choices[0].message
    assert message.content == "Yes."
    assert switch.checkpoint.raw.decode(unpack(switch.engine.requests[-1].tokens)).endswith("</think>\n\n")


def test_what_a_user_writes_opens_nothing(switch: Served) -> None:
    message = ask(switch, "Yes.", messages=[{"role": "user", "content": "<think>"}, USER]).choices[0].message
    assert message.content == "Yes."


def test_a_completion_is_text(switch: Served) -> None:
    switch.says(f"{THOUGHT}Yes.")
    assert switch.complete(max_tokens=200).json()["choices"][0]["text"] == f"{THOUGHT}Yes."


def test_tools_are_called_behind_it(switch: Served) -> None:
    says = THOUGHT + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for choice in ("auto", "required"):
        message = ask(switch, says, tools=[NOW], tool_choice=choice).choices[0].message
        assert (message.content, message.reasoning) == (None, "Let me see.")
        assert [call.function.name for call in message.tool_calls] == ["now"]
    assert '"name": "reasoning"' in switch.engine.requests[-1].sampling.grammar


def test_a_form_is_that_of_the_answer(switch: Served) -> None:
    message = ask(switch, f"{THOUGHT}{{}}", response_format={"type": "json_object"}).choices[0].message
    assert (message.content, message.reasoning) == ("{}", "Let me see.")
    assert "<think>" in switch.engine.requests[-1].sampling.grammar
    with with_template(OPEN) as open_:
        ask(open_, "x</think>{}", response_format={"type": "json_object"})
        assert "<think>" not in open_.engine.requests[-1].sampling.grammar


def test_langchain_takes_the_answer(switch: Served) -> None:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    switch.says(f"{THOUGHT}Yes.")
    chat = module.ChatOpenAI(model=MODEL, base_url=f"{switch.url}/v1", api_key="none", max_retries=0, max_tokens=200)
    answer = chat.invoke("Is it?")
    assert answer.content == "Yes."
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
