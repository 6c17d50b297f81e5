"""What the Anthropic API is refused with: its own shape, and words that name the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason
from coppice_scheduler.edge.anthropic.fields import MESSAGES, NO_EFFECT, REFUSED
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER, UnknownFields
from tests.contract.anthropic.test_messages import NOW, USER, WEATHER, ask, client_of, stream
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, Served, serving

__all__ = ["served", "shared_server"]

BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 20}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    turns = [{"role": role, "content": list(blocks)}]
    if role == "last":
        return {"messages": [USER, {"role": "assistant", "content": list(blocks)}]}
    return {"messages": [USER, *turns, USER] if role == "assistant" else turns}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens: 0"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"max_tokens": "5"}, "max_tokens must be an integer"),
    ({"messages": None}, "messages is required"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": [5]}, "messages[0] must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{**USER, "name": "x"}]}, "messages[0].name is not supported"),
    (
        {
            "messages": [USER, {"role": "assistant", "content": "It is"}],
            "output_format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        "goes on from a message",
    ),
    (turn({"type": "tool_use", "id": "a", "name": "now", "input": {}}, role="last"), "calls tools"),
    (turn(IMAGE), "messages[0].content[0] has the type 'image'; supported are text, tool_result"),
    (turn({"type": "document"}), "messages[0].content[0] has the type 'document'"),
    (turn(5), "messages[0].content[0] must be an object"),
    (turn({"text": "x"}), "messages[0].content[0].type is required"),
    (turn({"type": "text"}), "messages[0].content[0].text is required"),
    (turn({"type": "text", "text": "x", "colour": 1}), "messages[0].content[0].colour is not supported"),
    (turn({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id is required"),
    (turn({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "content[0].content[0] has the type"),
    (turn({"type": "tool_use", "id": "a", "name": "now", "input": {}}), "has the type 'tool_use'"),
    (
        turn({"type": "tool_use", "id": "a", "name": "now"}, role="assistant"),
        "messages[1].content[0].input is required",
    ),
    (turn({"type": "tool_use", "id": "a", "name": "n w", "input": {}}, role="assistant"), "content[0].name is 'n w'"),
    (turn({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "has the type 'tool_result'"),
    ({"system": 5}, "system must be a string or a list of content blocks"),
    ({"system": [IMAGE]}, "system[0] has the type 'image'"),
    ({"tools": [{"name": "now"}]}, "tools[0].input_schema is required"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tools": [NOW, NOW]}, "tools[1].name is that of another tool"),
    ({"tools": [{**NOW, "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be of type object"),
    ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
    ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type is 'required'"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice must be an object"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}}, "tool_choice names 'then'"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"thinking": {"type": "on"}}, "thinking.type is 'on'"),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens must be an integer"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type is 'json_object'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format.schema"),
    ({"cache_control": {"type": "persistent"}}, "cache_control must be"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl is '2h'"),
    ({"stop_sequences": "x"}, "stop_sequences must be a list of strings"),
    ({"stop_sequences": [""]}, "stop_sequences has an empty string"),
    ({"stop_sequences": ["x" * 257]}, "stop_sequences has a string of more than 256 bytes"),
    ({"messages": [turn(*[{"type": "tool_result", "tool_use_id": "a"}] * 3)["messages"][0]] * 1400}, "4200 turns and"),
    ({"thinking": {"type": "adaptive", "cache_control": {"type": "ephemeral"}}}, "thinking.cache_control is not"),
    ({"system": "word " * 4000}, "prompt is too long: "),
    ({"output_format": {"type": "text"}}, "output_format.type is 'text'"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 strings"),
    ({"temperature": 9}, "temperature is 9"),
    ({"stop": ["x"]}, "Unknown field 'stop'"),
    ({"max_completion_tokens": 5}, "Unknown field 'max_completion_tokens'"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
    ({"stream": "yes"}, "stream must be true or false"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_input_is_named(served: Served, fields: dict[str, Any], message: str) -> None:
    before = len(served.engine.requests)
    response = served.post({**BODY, **fields}, "/v1/messages")
    assert response.status_code == 400, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    assert len(served.engine.requests) == before


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_other_errors_have_the_same_shape(served: Served, path: str) -> None:
    for response, status, kind in (
        (served.post("{", path), 400, "invalid_request_error"),
        (served.post({**BODY, "model": "other"}, path), 404, "not_found_error"),
        (served.http.get(path), 405, "invalid_request_error"),
        (served.post(b"x" * (3 << 20), path), 413, "request_too_large"),
        (served.post({}, f"{path}/nope"), 404, "not_found_error"),
    ):
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind


def test_the_package_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other"):
        ask(served, model="other")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(served, extra_body={"temperature": 9})
    served.engine.script = lambda request: Script([], refused=Refused(RefusedReason.QUEUE_FULL, "full", 1500))
    with pytest.raises(anthropic.RateLimitError) as raised:
        ask(served)
    assert raised.value.response.headers["retry-after-ms"] == "1500"


def test_an_error_in_a_stream_is_an_event(served: Served) -> None:
    error = OutputError(OutputErrorCode.INTERNAL, "It broke.")
    served.says("one two", error=error, tokens_per_output=1)
    with pytest.raises(anthropic.APIStatusError, match="It broke"):
        stream(served)
    body = served.post({**BODY, "stream": True}, "/v1/messages").text
    assert body.rstrip().rsplit("\n", 2)[-2] == "event: error"
    assert "message_stop" not in body


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    tenants = TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("secret-of-a"),))])
    with serving(tenants) as served:
        served.says("Fine.")
        yield served


def test_keys_come_in_either_header(keyed: Served) -> None:
    assert ask_with(keyed, api_key="secret-of-a") == "a"
    assert ask_with(keyed, api_key=None, auth_token="secret-of-a") == "a"
    with pytest.raises(anthropic.AuthenticationError):
        ask_with(keyed, api_key="wrong")
    assert keyed.post(BODY, "/v1/messages").json()["error"]["type"] == "authentication_error"


def ask_with(served: Served, **options: Any) -> str:
    client_of(served, **options).messages.create(**BODY)
    return served.engine.requests[-1].tenant


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_without_effect_are_told(served: Served, name: str) -> None:
    served.says("Fine.")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = served.post({**BODY, name: {"any": "thing"}}, path)
        assert response.status_code == 200
        assert name in response.headers[IGNORED_HEADER]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_may_be_empty(served: Served, name: str) -> None:
    served.says("Fine.")
    for empty in (None, [], {}, ""):
        assert served.post({**BODY, name: empty}, "/v1/messages").status_code == 200
    assert served.post({**BODY, name: ["x"]}, "/v1/messages").status_code == 400


def test_what_cannot_be_told_to_the_model_is_listed(served: Served) -> None:
    served.says("Fine.")
    result = {"type": "tool_result", "tool_use_id": "a", "content": "It failed.", "is_error": True}
    call = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
    body = {
        **BODY,
        "messages": [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
        "tools": [{**WEATHER, "input_examples": [{"city": "Ulm"}]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
    }
    listed = served.post(body, "/v1/messages").headers[IGNORED_HEADER].split(", ")
    assert listed == [
        "tools[].input_examples",
        "messages[].content[].is_error",
        "thinking.budget_tokens",
        "thinking",
        "output_config.effort",
    ]


def test_unknown_fields_pass_where_the_operator_says_so() -> None:
    with serving(unknown_fields=UnknownFields.IGNORE) as served:
        served.says("Fine.")
        body = {**BODY, "colour": 1, "messages": [{**USER, "mood": 2}], "tools": [{**NOW, "shape": 3}]}
        response = served.post(body, "/v1/messages")
        assert response.status_code == 200
        assert response.headers[IGNORED_HEADER] == "colour, tools[].shape, messages[].mood"


def test_every_field_has_one_place_and_is_in_the_documents() -> None:
    assert not MESSAGES.supported & (MESSAGES.no_effect | MESSAGES.refused.keys())
    document = (Path(__file__).parents[3] / "docs" / "API.md").read_text()
    document = document[document.index("\n## Messages\n") : document.index("\n## Fields that are not supported\n")]
    for name in MESSAGES.supported:
        assert f"`{name}`" in document, name
