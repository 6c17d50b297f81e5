"""What a service is sent over REST and gRPC: it answers, and says whose fault it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from fastapi.testclient import TestClient
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from coppice_cache.edge.api.admin_http import build_app
from coppice_scheduler.edge.rest_app import create_app
from tests.contract.worker.test_worker_service import Stack as Worker
from tests.fakes.api import grpc_served, rest
from tests.fakes.api.surface import CALL_S, QUESTIONS, methods, path_of, routes
from tests.fakes.cache.cache_ends import Cache, FakeWorker
from tests.fuzz.fuzzing import LONG_S, corpus, fuzz

DURATIONS = [
    pytest.param(0.0, id="short", marks=pytest.mark.wide),
    pytest.param(LONG_S, id="long", marks=pytest.mark.long),
]
# Of calls that go on for ever; the others answer at once. Their first answer is waited for, and so long at most.
GO_ON = {"Watch"}
GO_ON_S = 0.1
OUR_BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


@pytest.fixture
def cache() -> Iterator[Cache]:
    started = Cache(audit_interval_s=0)
    worker = FakeWorker(started).wait_registered()
    yield started
    worker.stop()
    started.stop()


@pytest.mark.parametrize("for_s", DURATIONS)
def test_the_public_api_answers_every_body(for_s: float) -> None:
    with rest.serving() as served:
        walked = with_bodies(create_app(served.frontdoor, served.registry))
        assert {path for _, path in walked} >= {"/v1/messages", "/v1/responses", "/v1/requests/a/abort", "/tokenize"}

        def target(body: bytes) -> None:
            for method, path in walked:
                said = served.http.request(method, path, content=body)
                assert said.status_code in (200, 400, 404, 413, 422), (path, said.status_code, said.text)

        fuzz(target, corpus("rest"), for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_the_admin_rest_answers_every_body(cache: Cache, for_s: float) -> None:
    process = cache.process
    app = build_app(process._service, CollectorRegistry(), process._readiness)
    walked = with_bodies(app)
    assert walked >= {
        ("POST", "/v1/explain"),
        ("POST", "/v1/invalidate"),
        ("PUT", "/v1/pins/a"),
        ("DELETE", "/v1/pins/a"),
    }
    with closing(TestClient(app, base_url="http://localhost", raise_server_exceptions=False)) as client:

        def target(body: bytes) -> None:
            for method, path in walked:
                said = client.request(method, path, content=body, headers={"Content-Type": "application/json"})
                assert said.status_code in (200, 400, 404, 409), (path, said.status_code, said.text)

        fuzz(target, corpus("admin"), for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_the_cache_answers_every_message(cache: Cache, for_s: float) -> None:
    """One that is no message of the method ends as INTERNAL, as gRPC has it; any other is answered or refused."""
    called = methods("PrefixIndex", "PrefixIndexAdmin")
    with (
        grpc.insecure_channel(f"127.0.0.1:{cache.port}") as channel,
        grpc.insecure_channel(f"127.0.0.1:{cache.admin_port}") as admin,
    ):

        def target(content: bytes) -> None:
            for method in called:
                is_admin = method.containing_service.name == "PrefixIndexAdmin"
                code = raw_call(admin if is_admin else channel, method, content)
                assert code not in OUR_BUGS or not parses(method, content), (path_of(method), code)

        fuzz(target, messages(called, "grpc"), for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_worker_answers_every_message(for_s: float) -> None:
    """Its own port, for operators; `test_fuzz_sessions.py` has what schedulers say to it."""
    called, worker = methods("Worker"), Worker()
    try:
        with grpc.insecure_channel(worker.grpc_address) as channel:

            def target(content: bytes) -> None:
                for method in called:
                    code = raw_call(channel, method, content)
                    assert code not in OUR_BUGS or not parses(method, content), (path_of(method), code)

            fuzz(target, messages(called, "worker"), for_s=for_s)
    finally:
        worker.close()


@pytest.mark.parametrize("for_s", DURATIONS)
def test_generation_answers_every_message(for_s: float) -> None:
    called = methods("Generation")

    async def test(served: grpc_served.Served) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:

            def target(content: bytes) -> None:
                for method in called:
                    code = raw_call(channel, method, content)
                    assert code not in OUR_BUGS, (path_of(method), code)

            await asyncio.to_thread(fuzz, target, messages(called, "generation"), for_s=for_s)

    grpc_served.serve(test)


def messages(called: list[MethodDescriptor], folder: str) -> list[bytes]:
    """The corpus has them as JSON: {"method": ..., "message": {...}}."""
    found = []
    for entry in corpus(folder):
        told = json.loads(entry)
        (method,) = [method for method in called if method.name == told["method"]]
        message = message_factory.GetMessageClass(method.input_type)()
        found.append(json_format.ParseDict(told["message"], message).SerializeToString())
    return found


def parses(method: MethodDescriptor, content: bytes) -> bool:
    try:
        message_factory.GetMessageClass(method.input_type).FromString(content)
    except DecodeError:
        return False
    return True


def raw_call(channel: grpc.Channel, method: MethodDescriptor, content: bytes) -> grpc.StatusCode:
    """How a call ends; of one that goes on, whether it begins."""
    asked: Callable[..., Any] = channel.unary_stream(path_of(method), None, None)
    goes_on = method.name in GO_ON
    answers = asked(content, timeout=GO_ON_S if goes_on else CALL_S)
    try:
        for _ in answers:
            if goes_on:
                break
    except grpc.RpcError as error:
        return error.code()
    finally:
        answers.cancel()
    return grpc.StatusCode.OK


def with_bodies(app: Any) -> set[tuple[str, str]]:
    """Method and path of every route that is there, but for those that only ask."""
    return {(method, path) for method, path in routes(app) if method not in QUESTIONS}
