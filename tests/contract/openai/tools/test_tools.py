"""Tools over REST, as programs use them: the engine says what a model of the family would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER, UnknownFields
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.tools.formats import MARKERS
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import DEMO, MODEL, Served, error_of, events_of, serving

__all__ = ["served", "shared_server"]

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": CITY},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
USER: dict[str, Any] = {"role": "user", "content": "How is Ulm?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "now"}}
MISTRAL = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}"


@contextmanager
def with_template(template: str) -> Iterator[Served]:
    """And with the markers of all families as special tokens."""
    checkpoint = replace(load_checkpoint_text(DEMO), chat_template=template)
    checkpoint.raw.add_special_tokens(list(MARKERS))
    with serving(checkpoint=checkpoint) as served:
        yield served


def prompt_of(served: Served) -> str:
    return str(served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens)))


def ask(served: Served, **fields: Any) -> Any:
    """The only choice of an answer by the `openai` package."""
    options: Any = {"model": MODEL, "messages": [USER], "tools": [WEATHER, NOW], **fields}
    (choice,) = served.client().chat.completions.create(**options).choices
    return choice


def test_calls_are_told_apart_from_text(served: Served) -> None:
    served.says(TWO)
    choice = ask(served, max_tokens=200)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", '{"city": "Ulm"}')
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    served.says(CALL)
    assert ask(served, max_tokens=200).message.content is None
    served.says("It is fine.")
    choice = ask(served, max_tokens=200)
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It is fine.", None)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
def test_a_stream_has_what_a_whole_answer_has(served: Served, tokens_per_output: int) -> None:
    served.says(TWO, tokens_per_output=tokens_per_output)
    fields: dict[str, Any] = {"tools": [WEATHER, NOW], "n": 2, "max_tokens": 200, "logprobs": True}
    whole = served.chat(**fields).json()
    chunks = events_of(served.chat(stream=True, stream_options={"include_usage": True}, **fields).text)
    texts = ["", ""]
    calls: list[list[Any]] = [[], []]
    reasons: list[str | None] = [None, None]
    for chunk in chunks[:-2]:
        (part,) = chunk["choices"]
        texts[part["index"]] += part["delta"].get("content") or ""
        reasons[part["index"]] = part["finish_reason"] or reasons[part["index"]]
        for piece in part["delta"].get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls[part["index"]])
                calls[part["index"]].append({"id": "", "type": piece["type"], "function": {**piece["function"]}})
            else:
                calls[part["index"]][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    for index, choice in enumerate(whole["choices"]):
        told = [{**call, "id": ""} for call in choice["message"]["tool_calls"]]
        assert (texts[index], calls[index]) == (choice["message"]["content"], told)
        assert reasons[index] == choice["finish_reason"] == "tool_calls"
    assert chunks[-2]["usage"] == whole["usage"]


def test_the_package_of_openai_gathers_a_stream(served: Served) -> None:
    served.says(TWO)
    options: Any = {"model": MODEL, "messages": [USER], "tools": [WEATHER, NOW], "max_tokens": 200}
    with served.client().chat.completions.stream(**options) as stream:
        events = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["get_weather", "now"]
    assert events.count("tool_calls.function.arguments.done") == 2


def test_the_prompt_has_tools_calls_and_results(served: Served) -> None:
    served.says("Fine.")
    answer: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Ulm"}'}}
    ]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}
    assert ask(served, messages=[USER, answer, result]).message.content == "Fine."
    prompt = prompt_of(served)
    assert '{"type": "function", "function": {"name": "get_weather", "description": "Tells the weather.", ' in prompt
    assert '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", ' in prompt
    assert f"assistant:\n{CALL}" in prompt, "as the model wrote it, so that it is found in the cache"
    assert "tool: rain\n" in prompt
    answer["tool_calls"][0]["function"]["arguments"] = {"city": "Ulm"}
    assert ask(served, messages=[USER, {**answer, "content": ""}, result]).message.content == "Fine."
    assert prompt_of(served) == prompt
    assert served.chat(messages=[USER, {"role": "assistant", "content": "x", "tool_calls": ""}]).status_code == 200
    ask(served, messages=[USER, answer, result])
    tokens = served.post({"messages": [USER, answer, result], "tools": [WEATHER, NOW]}, "/tokenize").json()["tokens"]
    assert tokens == unpack(served.engine.requests[-1].tokens)


def test_what_the_package_of_openai_parsed_may_be_sent_back(served: Served) -> None:
    served.says(CALL)
    tool: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    options: Any = {"model": MODEL, "messages": [USER], "tools": [tool], "max_tokens": 200}
    with served.client().chat.completions.stream(**options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    for sent in (message, message.model_dump(exclude_none=True), {**message.model_dump(), "parsed": {"a": 1}}):
        answer = served.client().chat.completions.with_raw_response.create(
            **{**options, "messages": [USER, sent, result]}
        )
        assert "messages[].tool_calls[].function.parsed_arguments" in answer.headers.get(IGNORED_HEADER, "")


@pytest.mark.parametrize(
    ("fields", "max_calls"),
    [({"tool_choice": "required"}, 2), ({"tool_choice": NAMED}, 1), ({"parallel_tool_calls": False}, 1)],
)
def test_what_must_be_called(served: Served, fields: dict[str, Any], max_calls: int) -> None:
    twice = f"{CALL}\n{CALL.replace('get_weather', 'now')}"
    served.says(twice.replace("get_weather", "now"))
    choice = ask(served, max_tokens=200, **fields)
    assert len(choice.message.tool_calls) == max_calls
    assert choice.finish_reason == "tool_calls"
    grammar = served.engine.requests[-1].sampling.grammar
    assert bool(grammar) == ("tool_choice" in fields)
    assert ("get_weather" in grammar) == (fields.get("tool_choice") == "required")
    assert len(served.engine.finished_early) == (max_calls == 1), "what nobody would see is not computed"


def test_a_part_of_the_tools(served: Served) -> None:
    served.says(TWO)
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    choice = ask(served, max_tokens=200, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    grammar = served.engine.requests[-1].sampling.grammar
    assert "get_weather" in grammar
    assert "now" not in grammar
    assert '"now"' in prompt_of(served), "the prompt stays what it was, and cached"


def test_none_may_be_called(served: Served) -> None:
    served.says(CALL)
    choice = ask(served, max_tokens=200, tool_choice="none")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
    assert "get_weather" in prompt_of(served)
    with with_template(MISTRAL) as mistral:
        mistral.says("No.")
        ask(mistral, tool_choice="none", logit_bias={"5": 1})
        bias = mistral.engine.requests[-1].sampling.logit_bias
        assert len(bias) == 16
        assert mistral.checkpoint.raw.token_to_id("[TOOL_CALLS]").to_bytes(4, "little") in bias
        mistral.says("[TOOL_CALLS]No.")
        for fields in ({"tool_choice": "none"}, {"tools": []}):
            assert ask(mistral, **fields).message.content == "No.", "special tokens are no text where nothing is read"
        full = {str(number): 1 for number in range(1024)}
        assert error_of(mistral.chat(tools=[NOW], tool_choice="none", logit_bias=full), 400)["param"] == "logit_bias"


def test_markers_that_are_special_tokens_are_seen(served: Served) -> None:
    with with_template(MISTRAL) as mistral:
        mistral.says('[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
        choice = ask(mistral, max_tokens=100)
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        assert len(choice.message.tool_calls[0].id) == 9
        choice = ask(mistral, max_tokens=100, tool_choice="required")
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        mistral.says("[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}")
        assert [call.function.name for call in ask(mistral, max_tokens=100).message.tool_calls] == ["now"]
        ask(mistral, max_tokens=100, tool_choice="required")
        token = mistral.checkpoint.raw.token_to_id("[TOOL_CALLS]")
        assert f"<[{token}]>" in mistral.engine.requests[-1].sampling.grammar


def test_an_answer_that_is_cut_by_a_stop_string_has_no_call_to_make(served: Served) -> None:
    served.says(TWO)
    choice = ask(served, max_tokens=200, stop=["Ulm"])
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("stop", '{"city": "')
    choice = ask(served, max_tokens=200, stop=["name"])
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "I look.", None)
    choice = ask(served, max_tokens=200, stop=["now"])
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)


def test_much_json_within_json_is_refused_before_it_is_parsed(served: Served) -> None:
    def history(arguments: str) -> list[Any]:
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
        return [USER, {"role": "assistant", "tool_calls": [call, call]}]

    error = error_of(served.chat(messages=history("[" + "[]," * 30_000)), 400)
    assert (error["param"], error["code"]) == ("messages", "too_complex")
    assert "of the arguments" in error_of(served.chat(messages=history("{" + '"a":1,' * 30_000)), 400)["message"]
    assert served.engine.requests == []
    short = served.chat(messages=history('"' + "[" * 1_000 + '"' + "[" * 10), max_tokens=1)
    assert error_of(short, 400)["code"] == "context_length_exceeded", "what is no JSON goes to the template as it is"


def test_tools_are_tokenised_where_the_model_can_use_them() -> None:
    with with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}") as plain:
        error = error_of(plain.post({"messages": [USER], "tools": [NOW]}, "/tokenize"), 400)
        assert error["param"] == "tools"


def test_half_of_a_surrogate_pair_in_a_history_is_replaced(served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": "\\ud800"}'}}
    answer = served.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}], tools=[NOW])
    assert answer.status_code == 200, answer.text
    assert "\ufffd" in prompt_of(served)


def test_an_answer_that_is_cut_has_what_was_there(served: Served) -> None:
    def script(request: Request) -> Script:
        return Script(served.ids('<tool_call>\n{"name": "get_weather", "arguments": {"ci'), stop_token=False)

    served.engine.script = script
    choice = ask(served, max_tokens=200)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"ci'


def test_a_form_of_the_answer_beside_tools(served: Served) -> None:
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    served.says('{"a": 1}')
    assert ask(served, response_format=form).message.content == '{"a": 1}'
    assert "answer: %json" in served.engine.requests[-1].sampling.grammar
    served.says(CALL)
    assert ask(served, response_format=form, max_tokens=100).message.tool_calls


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "a list of tools"),
        ({"tools": ["f"]}, "tools[0]", "an object with type and function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "only function is supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "name, description and parameters"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a-z"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "128"),
        ({"tools": [{**NOW, "hue": 1}]}, "tools[0].hue", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f", "hue": 1}}]}, "tools[0].function.hue", "supported"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, None, "a JSON schema"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "that of another"),
        ({"tools": [NOW] * 129}, "tools", "129 entries; at most 128"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", "none, auto, required"),
        ({"tools": [NOW], "tool_choice": 5}, "tool_choice", "not an integer"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function", "the name of a function"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "'now', which is none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "none of the tools"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "mode and tools"),
        ({"tools": [NOW], "structured_outputs": {"regex": "a"}}, "tools", "combined with structured_outputs.regex"),
        ({"tools": [NOW], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "combined with tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
             "tool_choice": "auto"},
            "tools[0].function.parameters", "of type object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
             "tool_choice": "auto"},
            "tools[0].function.parameters", "of type object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": 5}}}}}
             ], "tool_choice": "required"},
            "tools[0]", "type must be a string",
        ),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", 'send "required"'),
        ({"tools": [NOW], "tool_choice": {**NAMED, "hue": 1}}, "tool_choice.hue", "not supported"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now", "hue": 1}}},
            "tool_choice.function.hue", "not supported",
        ),
        (
            {"tools": [NOW],
             "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}},
            "tool_choice.allowed_tools.tools[0]", "type and function",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "name"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]", "type and function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 1025}]},
            "messages[0].tool_calls", "1025 entries",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls", "of the assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments", "a string of JSON",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str | None, words: str) -> None:
    error = error_of(served.chat(**fields), 400)
    assert param is None or error["param"] == param
    assert words in error["message"]
    assert served.engine.requests == []


def test_a_model_whose_template_knows_no_tools_refuses_them() -> None:
    with with_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}") as plain:
        error = error_of(plain.chat(tools=[NOW]), 400)
        assert "does not read tools" in error["message"]
        document = plain.http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
        assert document["tools"]["enum"] == [[], None]


def test_what_else_tools_have_is_told_where_the_operator_takes_it() -> None:
    with serving(unknown_fields=UnknownFields.IGNORE) as lenient:
        lenient.says("Fine.")
        answer = lenient.chat(tools=[{**NOW, "cache_control": {}}], hue=1)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED_HEADER] == "hue, tools[].cache_control"


# --- langchain ----------------------------------------------------------------------------------------------------


def langchain(served: Served, **fields: Any) -> Any:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    return module.ChatOpenAI(model=MODEL, base_url=f"{served.url}/v1", api_key="none", max_retries=0, **fields)


def test_langchain_binds_tools_and_sends_results(served: Served) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    served.says(TWO)
    chat = langchain(served, max_tokens=200).bind_tools([WEATHER, NOW])
    answer = chat.invoke("How is Ulm?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Ulm"}),
        ("now", {}),
    ]
    streamed = None
    for chunk in chat.stream("How is Ulm?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [call["name"] for call in streamed.tool_calls] == ["get_weather", "now"]
    served.says("Rain.")
    results = [messages.ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert chat.invoke([messages.HumanMessage("How is Ulm?"), answer, *results]).content == "Rain."
    assert prompt_of(served).count("tool: rain\n") == 2


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_langchain_has_structured_output_by_every_method(served: Served, method: str) -> None:
    schema = {"title": "place", "description": "A place.", **CITY, "additionalProperties": False}
    served.says(CALL.replace("get_weather", "place") if method == "function_calling" else json.dumps({"city": "Ulm"}))
    chat = langchain(served, max_tokens=200).with_structured_output(schema, method=method)
    assert chat.invoke("Where?") == {"city": "Ulm"}
    assert served.engine.requests[-1].sampling.grammar
