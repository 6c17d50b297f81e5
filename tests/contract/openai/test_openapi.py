"""The server against its own description: generated requests to all routes, right and wrong ones.

The described model serves a fake engine that answers at once; statuses, content types and bodies of answers must be
among those that the document names, and what the document forbids must be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import LimitLeft, TenantLimitsLeft
from coppice_scheduler.edge.http.field_table import UnknownFields
from coppice_scheduler.edge.openai.parsing.fields import CHAT_ONLY, COMPLETION_ONLY, NO_EFFECT, REFUSED, SUPPORTED
from coppice_scheduler.edge.rest_app import create_app, description_of
from tests.fakes.api.engine import Script, unpack
from tests.fakes.api.rest import MODEL, Served, events_of, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.checks")
conformance = pytest.importorskip("schemathesis.specs.openapi.checks")
# As the server of these tests is; that it serves the same routes is a test.
DESCRIBED = description_of(MODEL, frozenset(), has_metrics=True, has_tools=True)["paths"]
OPERATIONS = [(method.upper(), path) for path, operations in DESCRIBED.items() for method in operations]
WITH_BODY = [(method, path) for method, path in OPERATIONS if "requestBody" in DESCRIBED[path][method.lower()]]
NOTHING_FOUND = ("/v1/models/{model_id}", "/v1/requests/{request_id}/abort")  # by ids that are made up
KEY = {"authorization": "Bearer key-a"}
TENANTS = TenantDirectory(
    [
        Tenant(
            id="a",
            api_key_sha256=(digest_of_key("key-a"),),
            requests_per_minute=1_000_000,
            tokens_per_minute=1_000_000,
        )
    ]
)
CHECKS = [
    checks.not_a_server_error,
    conformance.status_code_conformance,
    conformance.content_type_conformance,
    conformance.response_headers_conformance,
    conformance.response_schema_conformance,
    conformance.negative_data_rejection,
]
# Of unknown fields.
POLICIES = [
    UnknownFields.REFUSE,
    *(pytest.param(each, marks=pytest.mark.wide) for each in UnknownFields if each is not UnknownFields.REFUSE),
]
LENIENT_CHECKS = CHECKS[:-1]  # what the document forbids, unknown fields, is taken there


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        served.engine.script = lambda request: Script(unpack(request.tokens)[:4])
        yield served


@pytest.fixture(scope="module")
def described(server: Served) -> Any:
    return schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())


def try_out(
    described: Any, server: Served, method: str, path: str, num_examples: int, checks: Sequence[Any] = CHECKS
) -> dict[int, int]:
    """Statuses seen, by how often."""
    operation = described[path][method]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    if method == "GET":
        modes.pop()
    seen: dict[int, int] = {}

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
    def attempt(case: Any) -> None:
        response = case.call(base_url=server.url, headers=KEY)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        # What is wrong may be long, too, and is refused for that; schemathesis does not count it as a refusal.
        is_long = response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case.validate_response(response, checks=LENIENT_CHECKS if is_long else checks)

    attempt()
    return seen


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(described: Any, server: Served, method: str, path: str) -> None:
    seen = try_out(described, server, method, path, 15)
    assert seen.get(404 if path in NOTHING_FOUND else 200), "no request got through: the test tested nothing"


@pytest.fixture(scope="module", params=POLICIES)
def keyed(request: pytest.FixtureRequest) -> Iterator[tuple[Served, Sequence[Any]]]:
    """With keys, limits and what an operator may say of unknown fields; and what is checked of its answers."""
    with serving(TENANTS, unknown_fields=request.param) as served:
        served.engine.script = lambda request: Script(unpack(request.tokens)[:4])
        served.engine.limits_left["a"] = TenantLimitsLeft(LimitLeft(1000, 7, 53_000), LimitLeft(600, 450, 15_250))
        yield served, CHECKS if request.param is UnknownFields.REFUSE else LENIENT_CHECKS


@pytest.mark.wide
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_to_a_key_are_as_described(
    described: Any, keyed: tuple[Served, Sequence[Any]], method: str, path: str
) -> None:
    served, checked = keyed
    is_open = DESCRIBED[path][method.lower()].get("security") == []
    assert httpx.request(method, f"{served.url}{path}").status_code == (200 if is_open else 401)
    seen = try_out(described, served, method, path, 6, checked)
    assert seen
    assert 401 not in seen


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_answers_are_as_described_for_long(described: Any, server: Served, method: str, path: str) -> None:
    assert len(try_out(described, server, method, path, 500)) > 1


def test_every_field_and_route_is_described(server: Served) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    of_both = SUPPORTED | set(REFUSED) | set(NO_EFFECT) | {"add_special_tokens"}
    assert set(schemas["ChatRequest"]["properties"]) == of_both | CHAT_ONLY
    assert set(schemas["CompletionRequest"]["properties"]) == of_both | COMPLETION_ONLY
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]
    for path, operations in document["paths"].items():
        for method in operations:
            url = f"{server.url}{path.replace('{model_id}', MODEL)}"
            answer = httpx.request(method, url, content=b"")
            assert answer.status_code not in (404, 405) or "request_not_found" in answer.text, path


@pytest.mark.parametrize("name", ["reasoning", "text", "stream_options"])
def test_of_a_response_too_null_is_the_same_as_a_field_left_out(server: Served, name: str) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    described = document["components"]["schemas"]["ResponseRequest"]["properties"][name]
    assert described["additionalProperties"] == {"type": "null"}
    for value, status in ((None, 200), (1, 400)):
        body = {"model": MODEL, "input": "Hello.", name: {"unheard_of": value}}
        assert httpx.post(f"{server.url}/v1/responses", headers=KEY, json=body).status_code == status


def test_the_routes_are_those_that_are_described(server: Served) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    routes = [route for route in create_app(server.frontdoor, server.registry).routes if isinstance(route, APIRoute)]
    served = {(method, route.path_format) for route in routes for method in (route.methods or set()) - {"HEAD"}}
    assert served == described == {*OPERATIONS}
    assert all(operation["summary"] for operations in document["paths"].values() for operation in operations.values())


@pytest.mark.parametrize(("kind", "chunk"), [("chat", "ChatChunk"), ("complete", "Completion")])
def test_streams_and_log_probabilities_are_as_described(server: Served, kind: str, chunk: str) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    document = httpx.get(f"{server.url}/openapi.json").json()

    def validator(name: str) -> Any:
        root = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        return jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **root})

    fields: dict[str, Any] = {"n": 2, "return_token_ids": True, "stop": "zz", "max_tokens": 5, "seed": 1}
    fields |= {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2, "echo": True}
    whole = getattr(server, kind)(**fields).json()
    validator("ChatCompletion" if kind == "chat" else "Completion").validate(whole)
    assert whole["choices"][1]["logprobs"]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    streamed = getattr(server, kind)(stream=True, stream_options=usage, **fields)
    *events, _ = events_of(streamed.text)
    for event in events:
        validator(chunk).validate(event)
    assert any(event["choices"] and event["choices"][0]["logprobs"] for event in events)
    with pytest.raises(jsonschema_rs.ValidationError):
        validator(chunk).validate({**events[0], "model": 5})


@pytest.mark.parametrize(
    ("path", "schema", "name", "field"),
    [
        ("/v1/messages/count_tokens", "CountTokensRequest", "thinking", {"type": "disabled"}),
        ("/v1/messages/count_tokens", "CountTokensRequest", "tool_choice", {"type": "auto"}),
        ("/v1/chat/completions", "ChatRequest", "response_format", {"type": "text"}),
    ],
)
def test_of_inner_objects_too_null_is_the_same_as_a_field_left_out(
    server: Served, path: str, schema: str, name: str, field: dict[str, Any]
) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    described = document["components"]["schemas"][schema]["properties"][name]["anyOf"][0]
    described = described["anyOf"][0] if "anyOf" in described else described
    assert described["additionalProperties"] == {"type": "null"}
    for value, status in ((None, 200), (1, 400)):
        turns = [{"role": "user", "content": "Hello."}]
        body = {"model": MODEL, "messages": turns, name: {**field, "unheard_of": value}}
        assert httpx.post(f"{server.url}{path}", headers=KEY, json=body).status_code == status
