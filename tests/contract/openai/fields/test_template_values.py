"""What a client gives the chat template: `chat_template_kwargs`, `enable_thinking`, `reasoning_effort`."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from coppice_scheduler.edge.http.field_table import IGNORED_HEADER, UnknownFields
from coppice_scheduler.edge.openai.parsing import messages
from coppice_scheduler.edge.text.chat import ChatMessage
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import DEMO, MODEL, WAIT_S, Served, error_of, serving
from tests.fakes.waiting import wait_for

USER = {"role": "user", "content": "hi"}
ALL = "{{ bos_token }}{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}{% endfor %}"
# As Qwen 3's: a switch that has a default of its own.
SWITCH = ALL + "{% if enable_thinking is defined and enable_thinking is false %} quiet{% else %} thinks{% endif %}"
# As that of models with degrees.
DEGREES = (
    ALL + "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    " {{ reasoning_effort }}"
)
DATE = ALL + "{% if date_string is defined %} {{ date_string }}{% endif %}{{ levels | tojson if levels }}"


@contextmanager
def with_template(template: str, unknown_fields: UnknownFields = UnknownFields.REFUSE) -> Iterator[Served]:
    checkpoint = replace(load_checkpoint_text(DEMO), chat_template=template)
    with serving(checkpoint=checkpoint, unknown_fields=unknown_fields) as served:
        yield served


@pytest.fixture(scope="module")
def switch() -> Iterator[Served]:
    with with_template(SWITCH) as served:
        yield served


@pytest.fixture(scope="module")
def degrees() -> Iterator[Served]:
    with with_template(DEGREES) as served:
        yield served


@pytest.fixture(scope="module")
def dated() -> Iterator[Served]:
    with with_template(DATE) as served:
        yield served


def prompt_of(served: Served, **fields: Any) -> str:
    """The end of what the model was given."""
    answer = served.chat(messages=[USER], **fields)
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers
    return str(served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens))).partition("hi|")[2]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, " thinks"),
        ({"chat_template_kwargs": {}}, " thinks"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, " thinks"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, " quiet"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, " thinks"),
        ({"enable_thinking": False}, " quiet"),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}, " quiet"),
        ({"reasoning_effort": "none"}, " quiet"),
        ({"reasoning_effort": "high"}, " thinks"),
    ],
)
def test_thinking_is_switched_by_any_of_the_fields(switch: Served, fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(switch, **fields) == prompt


@pytest.mark.parametrize("effort", ["none", "low", "high"])
def test_a_template_with_degrees_is_told_the_degree(degrees: Served, effort: str) -> None:
    assert prompt_of(degrees) == " medium"
    assert prompt_of(degrees, reasoning_effort=effort) == f" {effort}"
    answer = degrees.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], reasoning_effort=effort
    )
    assert answer.choices


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_answer_that_is_sent_back_reaches_the_template(switch: Served, field: str) -> None:
    answered = {"role": "assistant", "content": "y", field: "because"}
    assert switch.chat(messages=[USER, answered]).status_code == 200
    prompt = switch.checkpoint.raw.decode(unpack(switch.engine.requests[-1].tokens))
    assert prompt.endswith("hi|y|because thinks")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("value | truncate(1)", "x" * 300),
        ("'long words' | truncate(value)", 1),
        ("value.format('x')", "{5}"),
        ("'x'.encode(value)", "no such"),
        ("1 / value", 0),
        ("value.a.b", {}),
    ],
)
def test_what_a_template_cannot_do_with_a_value_is_the_clients_error(expression: str, value: Any) -> None:
    with with_template(ALL + "{{ " + expression + " }}") as served:
        answer = served.chat(messages=[USER], chat_template_kwargs={"value": value})
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("number", [10**6 + 1, -(10**9), 1e300, [1, {"a": 10**10}]])
def test_a_number_that_a_template_could_do_harm_with_is_refused(switch: Served, number: Any) -> None:
    error = error_of(switch.chat(messages=[USER], chat_template_kwargs={"enable_thinking": number}), 400)
    assert "beyond 1000000" in error["message"]
    raw = json.dumps({"model": MODEL, "messages": [USER], "chat_template_kwargs": {"enable_thinking": 1}})
    infinite = raw.replace('"enable_thinking": 1', '"enable_thinking": 1e999')
    error_of(switch.post(infinite, "/v1/chat/completions"), 400)


def test_values_of_any_kind_reach_the_template(dated: Served) -> None:
    assert prompt_of(dated, chat_template_kwargs={"date_string": "26 Jul 2024"}) == " 26 Jul 2024"
    assert prompt_of(dated, chat_template_kwargs={"date_string": 5, "levels": [1, {"a": "é"}]}) == ' 5[1, {"a": "é"}]'


def test_tokenising_takes_them_too(switch: Served) -> None:
    def text_of(**fields: Any) -> str:
        found = switch.post({"messages": [USER], **fields}, "/tokenize").json()["tokens"]
        return str(switch.post({"tokens": found}, "/detokenize").json()["prompt"])

    assert text_of().endswith(" thinks")
    assert text_of(chat_template_kwargs={"enable_thinking": False}).endswith(" quiet")
    for wrong in ({"prompt": "a", "messages": None}, {"chat_template_kwargs": {"hue": 1}}):
        body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}, **wrong}
        assert "chat_template_kwargs" in error_of(switch.post(body, "/tokenize"), 400)["param"]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"chat_template_kwargs": {"hue": 1}}, "chat_template_kwargs.hue", "it reads enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "is the server's to give"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents", "is the server's to give"),
        ({"chat_template_kwargs": {"hue": None}}, "chat_template_kwargs.hue", "it reads enable_thinking"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "is not read"),
        ({"chat_template_kwargs": {"range": 1}}, "chat_template_kwargs.range", "is not read"),
        ({"chat_template_kwargs": {"x" * 5000: 1}}, "chat_template_kwargs." + "x" * 79, "is not read"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(33)), 1)}, "chat_template_kwargs", "at most 32"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 20_000}}, "chat_template_kwargs", "at most 16384"),
        ({"chat_template_kwargs": {"enable_thinking": nested(400)}}, None, ""),
        ({"enable_thinking": "no"}, "enable_thinking", "true or false"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort", "differs"),
        ({"reasoning_effort": 5}, "reasoning_effort", "a string"),
        ({"reasoning_effort": ""}, "reasoning_effort", "1 to 64"),
        ({"reasoning_effort": "x" * 65}, "reasoning_effort", "1 to 64"),
    ],
)
def test_what_is_wrong_is_named(switch: Served, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = switch.chat(messages=[USER], **fields)
    if param is None:
        assert answer.status_code in (200, 400)
        return
    error = error_of(answer, 400)
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize("field", ["enable_thinking", "reasoning_effort", "chat_template_kwargs"])
def test_a_prompt_that_is_no_chat_has_no_template(switch: Served, field: str) -> None:
    assert error_of(switch.complete(**{field: True}), 400)["param"] == field


def test_a_template_that_reads_nothing_says_so_or_its_operator_has_it_told() -> None:
    fields = {"enable_thinking": False, "reasoning_effort": "low", "chat_template_kwargs": {"a b": 1}}
    with serving() as plain:
        for name, value in fields.items():
            error = error_of(plain.chat(**{name: value}), 400)
            assert error["code"] == "unsupported_parameter"
            assert "it reads none" in error["message"]
    with serving(unknown_fields=UnknownFields.IGNORE) as lenient:
        answer = lenient.chat(**fields)
        told = "chat_template_kwargs.a?b, enable_thinking, reasoning_effort"
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, told)
        assert error_of(lenient.chat(chat_template_kwargs={"tools": []}), 400)["param"] == "chat_template_kwargs.tools"


def test_the_description_names_what_the_template_reads(switch: Served, dated: Served) -> None:
    def properties(served: Served) -> dict[str, Any]:
        document = httpx.get(f"{served.url}/openapi.json").json()
        found: dict[str, Any] = document["components"]["schemas"]["ChatRequest"]["properties"]
        return found

    assert set(properties(switch)["chat_template_kwargs"]["properties"]) == {"enable_thinking"}
    assert set(properties(dated)["chat_template_kwargs"]["properties"]) == {"date_string", "levels"}
    assert properties(switch)["reasoning_effort"]["type"] == ["string", "null"]
    assert properties(dated)["reasoning_effort"]["type"] == "null"
    assert json.dumps(properties(switch)["enable_thinking"]) == '{"type": ["boolean", "null"]}'


class WatchedMessage(ChatMessage):
    """One that can be referred to weakly."""


@pytest.mark.parametrize("streams", [False, True])
def test_what_was_sent_is_not_kept_while_the_call_runs(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget for bodies has it back by then. The thread that rendered it may hold it a moment longer."""
    made: list[weakref.ref[ChatMessage]] = []

    def make(*values: Any) -> ChatMessage:
        message = WatchedMessage(*values)
        made.append(weakref.ref(message))
        return message

    monkeypatch.setattr(messages, "ChatMessage", make)
    with with_template(DATE, UnknownFields.IGNORE) as served:
        served.engine.script = lambda request: Script([], hangs=True)
        content = json.dumps({"model": MODEL, "messages": [USER, USER], "stream": streams}).encode()
        with served.begin(content, "/v1/chat/completions"):
            assert served.engine.some_hanging.wait(WAIT_S)
            assert len(made) == 2

            def is_gone() -> bool:
                gc.collect()
                return all(message() is None for message in made)

            wait_for(is_gone, "what was sent is let go of while the call runs")
            assert not served.engine.some_cancelled.is_set()
        assert served.engine.some_cancelled.wait(WAIT_S)
