"""Refusals and failures of the core, clients that go away, clients that are slow."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import httpx
import openai
import pytest
from prometheus_client import generate_latest

from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script, echo, unpack
from tests.fakes.api.rest import MODEL, WAIT_S, Served, error_of, events_of, read_until_closed, serving

__all__ = ["served", "shared_server"]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RefusedReason.QUEUE_FULL, 429),
        (RefusedReason.TENANT_CONCURRENCY, 429),
        (RefusedReason.TENANT_QUEUE, 429),
        (RefusedReason.TOO_LONG, 400),
        (RefusedReason.NEVER_FITS, 400),
        (RefusedReason.EMPTY, 400),
        (RefusedReason.DRAINING, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_their_status_even_for_streams(
    served: Served, reason: RefusedReason, status: int, stream: bool
) -> None:
    served.says("", refused=Refused(reason, "no, because", 1200 if status != 400 else 0))
    response = served.complete(stream=stream)
    assert error_of(response, status)["message"] == "no, because"
    expected = ("2", "1200") if status != 400 else (None, None)
    assert (response.headers.get("retry-after"), response.headers.get("retry-after-ms")) == expected


def test_the_openai_client_sees_a_rate_limit(served: Served) -> None:
    served.says("", refused=Refused(RefusedReason.QUEUE_FULL, "full", 5))
    with pytest.raises(openai.RateLimitError, match="full"):
        served.client().completions.create(model=MODEL, prompt="x")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (OutputErrorCode.QUEUE_TIMEOUT, 429),
        (OutputErrorCode.TENANT_MAXIMUM, 429),
        (OutputErrorCode.TENANT_NOT_READY, 503),
        (OutputErrorCode.WORKER_LOST, 503),
        (OutputErrorCode.NEVER_FITS, 400),
        (OutputErrorCode.INTERNAL, 500),
    ],
)
def test_a_failure_before_the_first_token_has_a_status(served: Served, code: OutputErrorCode, status: int) -> None:
    served.says("", error=OutputError(code, "it went wrong", 0))
    for stream in (False, True):
        response = served.complete(stream=stream)
        assert error_of(response, status)["code"] == code.value
        assert ("retry-after" in response.headers) == (status in (429, 503))


def test_a_failure_mid_stream_is_an_event_and_the_end(served: Served) -> None:
    served.says("some text", error=OutputError(OutputErrorCode.WORKER_LOST, "the worker died", 0))
    events = events_of(served.chat(stream=True).text)
    assert events[-1]["error"]["code"] == "worker_lost"
    assert events[-1]["error"]["message"] == "the worker died"
    assert "[DONE]" not in events
    with pytest.raises(openai.APIError, match="the worker died"):
        list(
            served.client().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
            )
        )
    assert served.chat().status_code == 503


def test_one_refused_prompt_cancels_the_others(served: Served) -> None:
    def script(request: Request) -> Script:
        if unpack(request.tokens) == served.ids("bad"):
            return Script([], refused=Refused(RefusedReason.TENANT_QUEUE, "no", 10))
        return Script(served.ids("fine"), hangs=True)

    served.engine.script = script
    error_of(served.complete(prompt=["good", "bad", "good"]), 429)
    assert served.engine.num_running == 0
    assert len(served.engine.cancelled) == len(served.engine.requests) - 1


def test_not_ready_is_503(served: Served) -> None:
    served.engine.ready = False
    assert served.complete().headers["retry-after"] == "1"
    error_of(served.complete(), 503)
    assert httpx.get(f"{served.url}/readyz").status_code == 503
    assert httpx.get(f"{served.url}/healthz").status_code == 200
    served.engine.ready = True
    assert httpx.get(f"{served.url}/readyz").text == "ready\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels(served: Served, stream: bool) -> None:
    served.says("one two", hangs=True)
    body = json.dumps({"model": MODEL, "prompt": ["x", "y"], "stream": stream}).encode()
    connection = served.begin(body)
    assert served.engine.some_hanging.wait(WAIT_S)
    connection.close()
    assert served.engine.some_cancelled.wait(WAIT_S)
    served.engine.script = echo
    assert served.complete(prompt="after", max_tokens=1).status_code == 200  # the server goes on
    metrics = generate_latest(served.registry).decode()
    assert 'code="cancelled"' in metrics


def test_headers_and_bodies_must_arrive_in_time() -> None:
    with serving(header_timeout_s=1.0, body_timeout_s=1.0) as served:
        with served.connect() as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
            assert read_until_closed(half) == b""
        with served.begin(b'{"model"', length=100) as half:
            answer = read_until_closed(half)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        served.says("slow but sure")
        with httpx.Client() as client:  # a connection in use is not one that dawdles
            for _ in range(3):
                assert client.get(f"{served.url}/healthz").status_code == 200


def test_a_client_that_leaves_inside_its_body_is_no_error_of_ours(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.connect() as broken:
        broken.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        read_until_closed(broken)
    with served.begin(b'{"model"', length=100) as leaving:
        leaving.shutdown(socket.SHUT_WR)
        read_until_closed(leaving)
    assert served.complete().status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with serving(write_timeout_s=0.3, send_buffer_bytes=4096) as served:
        served.engine.script = lambda request: Script([], hangs=True)
        endless = served.ids(" forest" * 200)
        served.engine.script = lambda request: Script((endless * 100)[: request.max_new_tokens])
        body = {"model": MODEL, "prompt": ["x"] * 100, "max_tokens": 500, "stream": True, "return_token_ids": True}
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        raw = json.dumps(body).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        assert served.engine.some_cancelled.wait(WAIT_S)
        connection.close()


def test_too_many_headers_and_too_many_requests() -> None:
    with serving(max_requests=1) as served:
        headers = {f"x-{number}": "1" for number in range(65)}
        assert error_of(served.post({}, headers=headers), 400)["code"] == "too_many_headers"
        served.says("", hangs=True)
        connection = served.begin(json.dumps({"model": MODEL, "prompt": "x"}).encode())
        assert served.engine.some_hanging.wait(WAIT_S)
        response = served.complete()
        assert error_of(response, 503)["code"] == "too_many_requests"
        assert "retry-after" in response.headers
        connection.close()
        assert served.engine.some_cancelled.wait(WAIT_S)


def test_one_connection_too_many_is_told_so_and_hurts_nobody() -> None:
    with serving(max_connections=2, excess_connections=2) as served, ExitStack() as open_:
        for _ in range(2):
            begun(open_.enter_context(served.connect()))
        response = served.complete()
        assert error_of(response, 503)["code"] == "too_many_connections"
        assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        with served.connect() as excess:
            excess.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert read_until_closed(excess).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        open_.close()
        assert served.complete().status_code == 200


def test_connections_that_say_nothing_make_room_for_others() -> None:
    """The one that has been silent longest goes first; nobody who has said something does."""
    with serving(max_connections=3, excess_connections=1, header_timeout_s=3600.0) as served, ExitStack() as open_:
        kept = open_.enter_context(served.connect())
        begun(kept)
        silent = [open_.enter_context(served.connect()) for _ in range(5)]
        assert [read_until_closed(connection) for connection in silent[:2]] == [b""] * 2
        assert served.complete().status_code == 200
        assert read_until_closed(silent[2]) == b""
        silent[4].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert is_healthy(silent[4])
        kept.sendall(b"Host: x\r\n\r\n")
        assert is_healthy(kept)


def test_with_no_room_and_nobody_silent_newcomers_are_cut() -> None:
    with serving(max_connections=1, excess_connections=0) as served, served.connect() as kept:
        begun(kept)
        with served.connect() as beyond:
            assert read_until_closed(beyond) == b""
        kept.sendall(b"Host: x\r\n\r\n")
        assert is_healthy(kept)


def test_a_connection_that_says_nothing_is_cut_in_time() -> None:
    with serving(header_timeout_s=0.5) as served, served.connect() as silent:
        assert read_until_closed(silent) == b""
        assert served.complete().status_code == 200


def begun(connection: socket.socket) -> None:
    """A request without its end, which the front door has begun to read."""
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert is_healthy(connection)
    connection.sendall(b"GET /healthz HTTP/1.1\r\n")


def is_healthy(connection: socket.socket) -> bool:
    """What the answer says, which may come in parts."""
    answer = b""
    while not answer.endswith(b"ok\n"):
        part = connection.recv(65536)
        if not part:
            return False
        answer += part
    return answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\r\n\r\n", b"GET /\r\n\r\n"])
def test_what_is_no_http_is_refused_and_not_written_to_the_log(
    served: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:

    def answer_to(sent: bytes) -> bytes:
        with served.connect() as connection:
            connection.sendall(sent)
            return read_until_closed(connection)

    answer = answer_to(sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert answer_to(upgrade).startswith(b"HTTP/1.1 200 OK")
    assert caplog.messages == []
