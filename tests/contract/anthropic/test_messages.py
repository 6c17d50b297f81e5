"""Messages as the `anthropic` package sends and reads them; the engine says what a model would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from coppice.messages.reuse import Reuse
from coppice_scheduler.edge.frontend.admission import call_kind_of
from coppice_scheduler.edge.frontend.generation_spec import Endpoint, GenerationSpec
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import CONTEXT, DEMO, MODEL, Served, events_of, serving

__all__ = ["served", "shared_server"]

USER: dict[str, Any] = {"role": "user", "content": "How is Ulm?"}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Tells the weather.", "input_schema": CITY}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
BETWEEN = f"I look.\n{CALL} And\n{CALL}\n{CALL} Done."  # text behind calls
# As Qwen 3's, with tools.
THINKER = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@contextmanager
def with_template(template: str) -> Iterator[Served]:
    with serving(checkpoint=replace(load_checkpoint_text(DEMO), chat_template=template)) as served:
        yield served


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    with with_template(THINKER) as served:
        yield served


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": served.url, "api_key": "none", "max_retries": 0, **options})


THINK: dict[str, Any] = {"thinking": {"type": "adaptive"}}


def ask(served: Served, **fields: Any) -> Any:
    options: Any = {"model": MODEL, "messages": [USER], "max_tokens": 200, **fields}
    return client_of(served).messages.create(**options)


def stream(served: Served, **fields: Any) -> tuple[list[Any], Any]:
    """Events, and the message that the package makes of them."""
    options: Any = {"model": MODEL, "messages": [USER], "max_tokens": 200, **fields}
    with client_of(served).messages.stream(**options) as events:
        return list(events), events.get_final_message()


def prompt_of(served: Served) -> str:
    return str(served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens), skip_special_tokens=False))


def without_id(message: Any) -> Any:
    """Of equal messages equal. Ids of calls are random."""
    body = message.to_dict(exclude_none=True)
    for block in body["content"]:
        block.pop("id", None)
    return {**body, "id": None}


def test_an_answer_is_a_message(served: Served) -> None:
    served.says("Fine.", num_cached_tokens=3, num_written_tokens=2)
    message = ask(served, system="Be brief.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Fine."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    num_prompt_tokens = len(unpack(served.engine.requests[-1].tokens))
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 2)
    assert usage.input_tokens == num_prompt_tokens - 3 - 2
    assert usage.output_tokens >= len(served.ids("Fine."))
    served.says("Fine.", num_cached_tokens=num_prompt_tokens - 1, num_written_tokens=1)
    usage = ask(served, system="Be brief.").usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (num_prompt_tokens - 1, 0)
    assert usage.input_tokens == 1, "programs take 0 for what is not known"
    assert "Be brief." in prompt_of(served)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
@pytest.mark.parametrize("says", ["Fine.", THOUGHT + "Yes.", TWO, THOUGHT + TWO, THOUGHT + BETWEEN, ""])
def test_a_stream_tells_the_same(thinker: Served, says: str, tokens_per_output: int) -> None:
    thinker.says(says, tokens_per_output=tokens_per_output)
    whole = ask(thinker, tools=[WEATHER, NOW], **THINK)
    _, streamed = stream(thinker, tools=[WEATHER, NOW], **THINK)
    assert without_id(streamed) == without_id(whole)


def test_events_come_in_order(thinker: Served) -> None:
    thinker.says(THOUGHT + TWO)
    body = {"model": MODEL, "messages": [USER], "max_tokens": 200, "stream": True, "tools": [WEATHER, NOW], **THINK}
    response = thinker.post(body, "/v1/messages")
    names = [line[7:] for line in response.text.split("\n") if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    blocks = events[1:-2]
    kinds = [event["content_block"]["type"] for event in blocks if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks), "one after the other"
    for index in range(4):
        of_block = [event["type"] for event in blocks if event["index"] == index]
        assert (of_block[0], of_block[-1]) == ("content_block_start", "content_block_stop")
        assert set(of_block[1:-1]) <= {"content_block_delta"}
    signed = [event["delta"] for event in blocks if event.get("delta", {}).get("type") == "signature_delta"]
    assert signed == [{"type": "signature_delta", "signature": "unsigned"}]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
def test_text_and_calls_come_in_the_order_in_which_they_were_written(thinker: Served, tokens_per_output: int) -> None:
    thinker.says(THOUGHT + BETWEEN, tokens_per_output=tokens_per_output)
    content = ask(thinker, tools=[WEATHER], **THINK).content
    assert [block.type for block in content] == ["thinking", "text", "tool_use", "text", "tool_use", "tool_use", "text"]
    assert [block.text for block in content if block.type == "text"] == ["I look.", " And", " Done."]


def test_calls_and_thinking_are_blocks(thinker: Served) -> None:
    thinker.says(THOUGHT + TWO)
    message = ask(thinker, tools=[WEATHER, NOW], **THINK)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Let me see.", "I look.")
    assert thinking.signature == "unsigned"
    assert (first.type, first.name, first.input) == ("tool_use", "get_weather", {"city": "Ulm"})
    assert (second.name, second.input) == ("now", {})
    assert first.id
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_a_conversation_is_sent_back(thinker: Served) -> None:
    """As the package has it, with all that it puts into a message."""
    thinker.says(THOUGHT + TWO)
    answer = ask(thinker, tools=[WEATHER, NOW], **THINK)
    results = [
        {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "Rain."},
        {"type": "tool_result", "tool_use_id": answer.content[3].id, "content": [{"type": "text", "text": "Noon."}]},
        {"type": "text", "text": "Go on."},
    ]
    turns: list[Any] = [USER, answer.to_param(), {"role": "user", "content": results}]
    ask(thinker, messages=turns, tools=[WEATHER, NOW])
    asked = prompt_of(thinker)
    for part in ("[user]How is Ulm?", "[assistant]Let me see.I look.", 'get_weather{"city": "Ulm"}', "[tool]Rain."):
        assert part in asked, asked
    assert asked.index("[tool]Rain.") < asked.index("[tool]Noon.") < asked.index("[user]Go on.")
    whole = {"role": "assistant", **answer.to_dict()}
    ask(thinker, messages=[USER, whole, {"role": "user", "content": results}], tools=[WEATHER, NOW])
    assert prompt_of(thinker) == asked


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, None),
        ({"stop_sequences": ["three", "nope"]}, "stop_sequence", "three", "one two "),
        ({"max_tokens": 20_000}, "end_turn", None, "one two three four"),
    ],
)
def test_why_it_ended(
    served: Served, fields: dict[str, Any], reason: str, sequence: str | None, text: str | None
) -> None:
    served.says("one two three four")
    message = ask(served, **fields)
    _, streamed = stream(served, **fields)
    for each in (message, streamed):
        assert (each.stop_reason, each.stop_sequence) == (reason, sequence)
        assert text is None or each.content[0].text == text


def test_what_fills_the_context_says_so(served: Served) -> None:
    served.engine.script = lambda request: Script(served.ids("on") * 2000, stop_token=False)
    message = ask(served, max_tokens=10 * CONTEXT)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == CONTEXT - len(unpack(served.engine.requests[-1].tokens))


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "any"}, "tool_calls"),
        ({"type": "tool", "name": "now"}, "tool_calls"),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_forced_calls_are_bound_by_a_grammar(served: Served, choice: dict[str, Any], mode: str | None) -> None:
    served.says('{"name": "now", "arguments": {}}')
    ask(served, tools=[WEATHER, NOW], tool_choice=choice)
    assert bool(served.engine.requests[-1].sampling.grammar) == (mode is not None)


def test_one_call_where_more_are_not_wanted(thinker: Served) -> None:
    thinker.says(TWO)
    message = ask(thinker, tools=[WEATHER, NOW], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["text", "tool_use"]


def test_a_call_that_was_cut_has_what_came(thinker: Served) -> None:
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": [1, 2'
    thinker.engine.script = lambda request: Script(thinker.ids(cut), stop_token=False)
    for message in (
        ask(thinker, tools=[WEATHER], max_tokens=len(thinker.ids(cut))),
        stream(thinker, tools=[WEATHER], max_tokens=len(thinker.ids(cut)))[1],
    ):
        assert message.stop_reason == "max_tokens"
        assert message.content[0].input == {"city": "Ulm", "days": [1, 2]}


@pytest.mark.parametrize("arguments", ['{"city": NaN}', "{'city': 'Ulm'}", '["Ulm"]', '{"city": "Ulm",}'])
def test_arguments_that_are_no_object_are_told_as_they_are(thinker: Served, arguments: str) -> None:
    thinker.says(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>')
    response = thinker.post({"model": MODEL, "messages": [USER], "max_tokens": 200, "tools": [WEATHER]}, "/v1/messages")
    body = json.loads(response.text, parse_constant=pytest.fail)
    for block in body["content"]:
        if block["type"] == "tool_use":
            assert block["input"] == {"INVALID_JSON": arguments}
        else:
            assert arguments in block["text"], "what is no call is text"


def test_thinking_is_switched(thinker: Served) -> None:
    thinker.says(THOUGHT + "Yes.")
    for thinking, is_off in (
        ({"type": "enabled", "budget_tokens": 1024}, False),
        ({"type": "adaptive"}, False),
        ({"type": "disabled"}, True),
        (anthropic.NOT_GIVEN, True),  # programs that do not ask for it read the first block as text
    ):
        ask(thinker, thinking=thinking)
        assert ("<think>\n\n</think>" in prompt_of(thinker)) == is_off
    message = ask(thinker, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("", "Yes.")
    _, streamed = stream(thinker, thinking={"type": "adaptive", "display": "omitted"})
    assert without_id(streamed) == without_id(message)


def test_an_answer_of_a_schema(served: Served) -> None:
    served.says('{"city": "Ulm"}')
    form = {"type": "json_schema", "schema": CITY}
    for fields in ({"output_config": {"format": form}}, {"extra_body": {"output_format": form}}):
        message = ask(served, **fields)
        assert json.loads(message.content[0].text) == {"city": "Ulm"}
        assert "city" in served.engine.requests[-1].sampling.grammar


def test_what_should_stay_cached(served: Served) -> None:
    served.says("Fine.")
    breakpoint = {"type": "ephemeral"}
    ask(served)
    assert served.engine.requests[-1].retain_ms == 0
    assert served.engine.requests[-1].reuse is Reuse.UNKNOWN
    assert served.engine.requests[-1].call_kind == call_kind_of(GenerationSpec("m", (), endpoint=Endpoint.MESSAGES))
    ask(served, cache_control={**breakpoint, "scope": "global"})
    assert served.engine.requests[-1].retain_ms == 5 * 60_000
    assert served.engine.requests[-1].reuse is Reuse.LIKELY
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    ask(served, system=system, tools=[{**NOW, "cache_control": breakpoint}])
    assert served.engine.requests[-1].retain_ms == 30 * 60_000, "the operator's maximum"


def test_turns_of_one_role_are_one(thinker: Served) -> None:
    thinker.says("Fine.")
    system = {"role": "system", "content": "It is noon."}
    ask(thinker, system="Be brief.", messages=[system, USER, {"role": "user", "content": "And Bonn?"}, system, USER])
    answers = [{"role": "assistant", "content": text} for text in ("It ", "rains.")]
    expected = "[system]Be brief.\nIt is noon.[user]How is Ulm?\nAnd Bonn?[system]It is noon.[user]How is Ulm?"
    assert expected in prompt_of(thinker)
    ask(thinker, messages=[USER, *answers, USER])
    assert "[user]How is Ulm?[assistant]It rains.[user]How is Ulm?" in prompt_of(thinker)


def test_a_header_that_differs_with_each_call_is_no_prompt(served: Served) -> None:
    served.says("Fine.")
    prompts = set()
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2; cch={number};"
        brief = {"type": "text", "text": "Be brief."}
        ask(served, system=[{"type": "text", "text": line}, brief])
        prompts.add(prompt_of(served))
        ask(served, system=f"{line}\nBe brief.")
        prompts.add(prompt_of(served))
        ask(served, messages=[{"role": "system", "content": f"{line}\nBe brief."}, USER])
        prompts.add(prompt_of(served))
    (prompt,) = prompts
    assert "billing" not in prompt
    assert "Be brief." in prompt


def test_tokens_are_counted(served: Served) -> None:
    served.says("Fine.")
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "system": "Be brief.", "tools": [WEATHER]}
    counted = client_of(served).messages.count_tokens(**fields).input_tokens
    ask(served, **fields)
    assert counted == len(unpack(served.engine.requests[-1].tokens))
    fewer = client_of(served).messages.count_tokens(model=MODEL, messages=[USER]).input_tokens  # type: ignore[list-item]
    assert 0 < fewer < counted


def test_the_openai_api_says_the_same(thinker: Served) -> None:
    """One prompt, whichever API it came by."""
    thinker.says("Fine.")
    ask(thinker, system="Be brief.", tools=[WEATHER])
    by_messages = thinker.engine.requests[-1].tokens
    messages = [{"role": "system", "content": "Be brief."}, USER]
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": CITY}
    tools = [{"type": "function", "function": function}]
    thinker.chat(messages=messages, tools=tools, enable_thinking=False)
    assert thinker.engine.requests[-1].tokens == by_messages


def test_line_ends_of_unicode_do_not_cut_an_event(served: Served) -> None:
    text = "one\u2028two\x85three"
    served.says(text)
    body = {"model": MODEL, "messages": [USER], "max_tokens": 40, "stream": True}
    for response in (served.post(body, "/v1/messages"), served.chat(stream=True, max_tokens=40)):
        assert "\u2028" not in response.text
        assert "\x85" not in response.text
    assert stream(served)[1].content[0].text == text


def test_nothing_of_openai_is_in_a_stream(served: Served) -> None:
    served.says("Fine.")
    body = {"model": MODEL, "messages": [USER], "max_tokens": 20, "stream": True}
    assert "[DONE]" not in served.post(body, "/v1/messages").text
    assert events_of(served.chat(stream=True).text)[-1] == "[DONE]"


def test_an_answer_goes_on_from_the_words_of_the_assistant(thinker: Served) -> None:
    thinker.says(" sunny.")
    thinker.engine.requests.clear()
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "is"}]},
    ]
    answer = ask(thinker, messages=messages)
    assert [(block.type, block.text) for block in answer.content] == [("text", " sunny.")]
    tokens = unpack(thinker.engine.requests[0].tokens)
    text = thinker.post({"tokens": tokens}, "/detokenize").json()["prompt"]
    assert text.endswith("[user]How is Ulm?[assistant]It is")
    counted = client_of(thinker).messages.count_tokens(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert counted.input_tokens == len(tokens)
    with pytest.raises(anthropic.BadRequestError, match="has no thinking"):
        ask(thinker, messages=messages, **THINK)
