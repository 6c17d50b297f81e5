"""Responses as the `openai` package sends and reads them; the engine says what a model would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import ResponseIncludable
from pydantic import BaseModel

from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.openai.responses.fields import (
    INCLUDABLE,
    LOGPROBS,
    NO_EFFECT,
    REFUSED,
    RESPONSES,
)
from coppice_scheduler.edge.openai.responses.input_items import ITEM_NO_EFFECT, PART_NO_EFFECT
from tests.contract.anthropic.test_messages import BETWEEN, CALL, THINKER, THOUGHT, TWO, with_template
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import MODEL, Served

__all__ = ["served", "shared_server"]

ASKED = "How is Ulm?"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": None}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None, "strict": None}


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    with with_template(THINKER) as served:
        yield served


def ask(served: Served, **fields: Any) -> Any:
    options: Any = {"model": MODEL, "input": ASKED, "max_output_tokens": 200, **fields}
    return served.client().responses.create(**options)


def stream(served: Served, **fields: Any) -> tuple[list[Any], Any]:
    """Events, and the response that the package makes of them."""
    options: Any = {"model": MODEL, "input": ASKED, "max_output_tokens": 200, **fields}
    with served.client().responses.stream(**options) as events:
        return list(events), events.get_final_response()


def prompt_of(served: Served) -> str:
    return str(served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens), skip_special_tokens=False))


def without_ids(response: Any) -> Any:
    """Of equal responses equal."""
    body = response.to_dict()
    for item in body["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return {**body, "id": None, "created_at": None, "output_text": None}


def test_an_answer_is_a_response(served: Served) -> None:
    served.says("Fine.", num_cached_tokens=3, num_written_tokens=2)
    response = ask(served, instructions="Be brief.", metadata={"team": "a"}, temperature=0.5)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert (response.output_text, response.error, response.incomplete_details) == ("Fine.", None, None)
    assert (response.metadata, response.temperature) == ({"team": "a"}, 0.5)
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.input_tokens == len(unpack(served.engine.requests[-1].tokens))
    assert (usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens) == (3, 2)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "Be brief." in prompt_of(served)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
@pytest.mark.parametrize("says", ["Fine.", THOUGHT + "Yes.", TWO, THOUGHT + TWO, THOUGHT + BETWEEN, ""])
def test_a_stream_tells_the_same(thinker: Served, says: str, tokens_per_output: int) -> None:
    thinker.says(says, tokens_per_output=tokens_per_output)
    whole = ask(thinker, tools=[WEATHER, NOW])
    events, streamed = stream(thinker, tools=[WEATHER, NOW])
    assert without_ids(streamed) == without_ids(whole)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


def test_events_come_in_order(thinker: Served) -> None:
    thinker.says(THOUGHT + TWO)
    body = {"model": MODEL, "input": ASKED, "stream": True, "tools": [WEATHER, NOW], "max_output_tokens": 200}
    text = thinker.post(body, "/v1/responses").text
    names = [line[7:] for line in text.split("\n") if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[:2] == ["response.created", "response.in_progress"]
    added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    for index in range(4):
        of_item = [event for event in events if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[-1]["type"] == "response.output_item.done"
        done = of_item[-1]["item"]
        assert done == events[-1]["response"]["output"][index]
        said = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert said == (done["arguments"] if "arguments" in done else done["content"][0]["text"])
    assert [event.get("output_index", 0) for event in events[2:-1]] == sorted(
        event.get("output_index", 0) for event in events[2:-1]
    )


@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
def test_text_and_calls_come_in_the_order_in_which_they_were_written(thinker: Served, tokens_per_output: int) -> None:
    thinker.says(THOUGHT + BETWEEN, tokens_per_output=tokens_per_output)
    output = ask(thinker, tools=[WEATHER]).output
    call, message = "function_call", "message"
    assert [item.type for item in output] == ["reasoning", message, call, message, call, call, message]
    assert [item.content[0].text for item in output if item.type == message] == ["I look.", " And", " Done."]


def test_reasoning_and_calls_are_items(thinker: Served) -> None:
    thinker.says(THOUGHT + TWO)
    thought, text, first, second = ask(thinker, tools=[WEATHER, NOW]).output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Let me see.", [])
    assert text.content[0].text == "I look."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "get_weather", {"city": "Ulm"})
    assert second.name == "now"
    assert first.call_id != second.call_id


def test_a_conversation_is_sent_back(thinker: Served) -> None:
    """As the package has it, with all that it puts into an item; and as objects."""
    thinker.says(THOUGHT + TWO)
    answer = ask(thinker, tools=[WEATHER, NOW])
    results = [
        {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "Rain."},
        {"type": "function_call_output", "call_id": answer.output[3].call_id,
         "output": [{"type": "input_text", "text": "Noon."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]  # fmt: skip
    asked: Any = {"role": "user", "content": ASKED}
    ask(thinker, input=[asked, *answer.output, *results], tools=[WEATHER, NOW])
    prompt = prompt_of(thinker)
    expected = '[user]How is Ulm?[assistant]Let me see.I look.<tool_call>get_weather{"city": "Ulm"}<tool_call>now{}'
    assert f"{expected}[tool]Rain.[tool]Noon.[user]Go on." in prompt
    ask(thinker, input=[asked, *(item.to_dict() for item in answer.output), *results], tools=[WEATHER, NOW])
    assert prompt_of(thinker) == prompt


def test_what_the_package_parsed_is_sent_back(served: Served) -> None:
    served.says('{"city": "Ulm"}')
    options: Any = {"model": MODEL, "max_output_tokens": 50, "text_format": City}
    parsed = served.client().responses.parse(input=ASKED, **options)
    again = [{"role": "user", "content": ASKED}, *parsed.output, {"role": "user", "content": "And?"}]
    served.client().responses.parse(input=again, **options)
    served.client().responses.parse(input=[*again[:1], *(item.to_dict() for item in parsed.output)], **options)
    assert '{"city": "Ulm"}' in prompt_of(served)


def test_the_chat_api_has_the_same_prompt(served: Served) -> None:
    served.says("Fine.")
    ask(served, instructions="Be brief.", tools=[WEATHER])
    by_response = served.engine.requests[-1].tokens
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    function = {"name": "get_weather", "parameters": CITY}
    served.chat(messages=messages, tools=[{"type": "function", "function": function}])
    assert served.engine.requests[-1].tokens == by_response


def test_an_answer_that_was_cut_is_incomplete(served: Served) -> None:
    served.engine.script = lambda request: Script(served.ids("one two three four"), stop_token=False)
    response = ask(served, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"
    body = {"model": MODEL, "input": ASKED, "stream": True, "max_output_tokens": 3}
    assert "event: response.incomplete\n" in served.post(body, "/v1/responses").text


def test_forms_of_an_answer(served: Served) -> None:
    served.says('{"city": "Ulm"}')
    options: Any = {"model": MODEL, "input": ASKED, "max_output_tokens": 50}
    assert served.client().responses.parse(text_format=City, **options).output_parsed == City(city="Ulm")
    assert "city" in served.engine.requests[-1].sampling.grammar
    _, streamed = stream(served, text_format=City)
    assert streamed.output_parsed == City(city="Ulm")
    ask(served, text={"format": {"type": "json_object"}})
    assert served.engine.requests[-1].sampling.grammar
    ask(served, text={"format": {"type": "text"}})
    assert not served.engine.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ("required", True),
        ({"type": "function", "name": "now"}, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, True),
        ("auto", False),
        ("none", False),
    ],
)
def test_forced_calls_are_bound_by_a_grammar(served: Served, choice: Any, is_forced: bool) -> None:
    served.says('{"name": "now", "arguments": {}}')
    ask(served, tools=[WEATHER, NOW], tool_choice=choice)
    assert bool(served.engine.requests[-1].sampling.grammar) == is_forced


def test_one_call_where_more_are_not_wanted(thinker: Served) -> None:
    thinker.says(f"{CALL}\n{CALL}")
    assert len(ask(thinker, tools=[WEATHER], parallel_tool_calls=False).output) == 1


def test_effort_reaches_the_template(thinker: Served) -> None:
    thinker.says("Fine.")
    for effort, is_off in (("none", True), ("low", False)):
        response = ask(thinker, reasoning={"effort": effort})
        assert response.reasoning.effort == effort
        assert ("<think>\n\n</think>" in prompt_of(thinker)) == is_off


@pytest.mark.parametrize("is_told", [False, True])
def test_a_stream_that_breaks_raises_in_the_package(served: Served, is_told: bool) -> None:
    error = OutputError(OutputErrorCode.INTERNAL, "It broke.")
    served.says("one two", error=error, tokens_per_output=1)
    body: dict[str, Any] = {"model": MODEL, "input": ASKED, "stream": True, "max_output_tokens": 50}
    if is_told:
        text = served.post(body, "/v1/responses").text
        *_, failed, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": "internal", "message": "It broke."}
        assert failed["response"]["output"][-1]["status"] == "incomplete"
        assert (last["type"], last["message"], last["error"]["message"]) == ("error", "It broke.", "It broke.")
        assert last["sequence_number"] == failed["sequence_number"] + 1
        return
    with pytest.raises(openai.APIError, match="It broke"):
        list(served.client().responses.create(**body))
    with pytest.raises(openai.APIError, match="It broke"):
        stream(served)


def test_a_choice_is_told_as_it_was_made(served: Served) -> None:
    served.says('{"name": "now", "arguments": {}}')
    choice = {"type": "function", "name": "now"}
    assert ask(served, tools=[NOW], tool_choice=choice).tool_choice.to_dict() == choice


def test_effort_in_words_that_templates_know() -> None:
    with with_template("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}") as served:
        served.says("Fine.")
        for effort in ("high", "xhigh"):
            ask(served, reasoning={"effort": effort})
            assert prompt_of(served) == f"high{ASKED}"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is required"),
    ({"input": []}, "input", "input is an empty list"),
    ({"input": 5}, "input", "input must be a string or a list of items"),
    ({"input": [5]}, "input[0]", "input[0] must be an object"),
    ({"input": [{"content": "x"}]}, "input[0].type", "input[0].type is required"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "input[0].role is 'tool'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood", "input[0].mood is not supported"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "answers are not kept here"),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "answers are not kept here"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "input[0].type is 'computer_call'"),
    ({"input": [{"type": "function_call", "name": "now"}]}, "input[0].call_id", "input[0].call_id is required"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "output is required"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id is not supported"),
    ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
    ({"background": True}, "background", "background is not supported"),
    ({"truncation": "left"}, "truncation", "truncation is not supported yet. Leave it out or send"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "it is 'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is required"),
    ({"tools": [NOW, NOW]}, "tools[1].name", "that of another tool"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "tool_choice must be none, auto, required"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "text.format.type is 'grammar'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is required"),
    ({"include": ["message.output_text.tokens"]}, "include", "did you mean message.output_text.logprobs?"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be from 0 to 20"),
    ({"top_logprobs": "2"}, "top_logprobs", "top_logprobs must be an integer"),
    ({"input": "word " * 4000}, "input", "Shorten it"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "now"}] * 1025}, "input", "has 1025 calls"),
    ({"metadata": {"a": 1}}, "metadata", "metadata must be an object of strings"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
    ({"max_tokens": 5}, "max_tokens", "Unknown field 'max_tokens'"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "include_usage is not supported"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_input_is_named(served: Served, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.client().responses.create(model=MODEL, input=ASKED, extra_body=fields)  # type: ignore[call-overload]
    assert message in raised.value.message
    assert raised.value.param == param
    assert not served.engine.requests


def test_what_has_no_effect_is_listed(served: Served) -> None:
    served.says("Fine.")
    body = {
        "model": MODEL,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}], "phase": "commentary"}],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "top_logprobs": 2,
        "client_metadata": {"installation": "1"},
        "truncation": "auto",
        "previous_response_id": "",
        "stream_options": {"include_obfuscation": True},
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "text": {"verbosity": "low"},
    }
    response = served.post(body, "/v1/responses")
    assert response.json()["store"] is False
    assert response.json()["top_logprobs"] == 0
    assert served.engine.requests[-1].sampling.num_logprobs is None
    listed = response.headers["x-coppice-ignored-fields"]
    assert listed == (
        "client_metadata, store, input[].phase, reasoning.summary, reasoning.effort, text.verbosity, "
        "include.reasoning.encrypted_content, include.web_search_call.action.sources, top_logprobs, "
        "stream_options.include_obfuscation"
    )


def test_all_that_the_package_knows_may_be_included(served: Served) -> None:
    assert set(get_args(ResponseIncludable)) <= set(INCLUDABLE)
    served.says("Fine.")
    for name in INCLUDABLE:
        response = served.post({"model": MODEL, "input": ASKED, "include": [name]}, "/v1/responses")
        assert response.status_code == 200
        listed = response.headers.get("x-coppice-ignored-fields")
        assert listed == (None if name == LOGPROBS else f"include.{name}")


def test_other_errors(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")
    assert httpx.get(f"{served.url}/v1/responses").status_code == 405


def test_every_field_has_one_place_and_is_in_the_documents() -> None:
    assert not RESPONSES.supported & (NO_EFFECT.keys() | REFUSED.keys())
    document = (Path(__file__).parents[4] / "docs" / "API.md").read_text()
    document = document[document.index("\n## Responses\n") : document.index("\n## Messages\n")]
    for name in RESPONSES.supported | (ITEM_NO_EFFECT - {"id", "status"}) | PART_NO_EFFECT:
        assert f"`{name}`" in document, name
