"""What clients see of a front door that ends in the middle of their answers: of a planned stop an error, in the words
of the API that they use; of a kill a connection that breaks, since nobody is left to say anything."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from tests.e2e.anthropic.test_agent_session import write_checkpoint
from tests.e2e.stack import STOP_S, Stack
from tests.e2e.test_front_doors import front_doors
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide

CHAT = [{"role": "user", "content": "Go on."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 200, "ignore_eos": True},
    "/v1/responses": {"input": CHAT, "max_output_tokens": 200},
    "/v1/messages": {"messages": CHAT, "max_tokens": 200},
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Of one front door, whose streams nobody lets end before it does."""
    arguments = ["--front-doors=1", "--drain-s=0"]
    with Stack(write_checkpoint(tmp_path / "model"), tmp_path / "stack", scheduler_args=arguments) as stack:
        stack.complete([1, 2, 3], 2)
        yield stack


@contextmanager
def still_worker(stack: Stack) -> Iterator[None]:
    """No answer comes to its end meanwhile, however fast the machine is."""
    worker = stack.services["worker-0"]
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


def ask(stack: Stack, path: str, **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    body = {"model": "tiny", "stream": True, **BODIES[path], **fields}
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def begun(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = connection.getresponse()
    assert response.status == 200
    response.readline()
    return response


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def wait_at_work(stack: Stack, count: int) -> None:
    def at_work() -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(stack.metric(stack.port, name) for name in names) == count

    wait_for(at_work, f"{count} requests to be at work")


def test_a_planned_stop_ends_every_stream_with_an_error(stack: Stack) -> None:
    with still_worker(stack), ExitStack() as open_now:
        connections = {path: open_now.enter_context(closing(ask(stack, path))) for path in BODIES}
        responses = {path: begun(connection) for path, connection in connections.items()}
        channel = open_now.enter_context(grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}"))
        request = pb.GenerateRequest(model="tiny", text="hello", max_tokens=200, ignore_eos=True)
        call = pb_grpc.GenerationStub(channel).Generate(request, timeout=60)
        whole = open_now.enter_context(closing(ask(stack, "/v1/completions", stream=False)))
        wait_at_work(stack, len(BODIES) + 2)
        stack.services["scheduler"].signal(signal.SIGTERM)
        last = {path: events_of(response.read().decode())[-1] for path, response in responses.items()}
        answer = whole.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "scheduler_lost")
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        process = stack.services["scheduler"].process
        assert process is not None
        assert process.wait(STOP_S) == 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (last[path]["error"]["code"], last[path]["error"]["type"]) == (
            "scheduler_lost",
            "service_unavailable_error",
        )
    assert (last["/v1/responses"]["type"], last["/v1/responses"]["code"]) == ("error", "scheduler_lost")
    assert (last["/v1/messages"]["type"], last["/v1/messages"]["error"]["type"]) == ("error", "overloaded_error")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shut down" in (raised.value.details() or "")


def test_a_front_door_that_is_killed_breaks_its_connections_and_another_serves(stack: Stack) -> None:
    with still_worker(stack), ExitStack() as open_now:
        stream = begun(open_now.enter_context(closing(ask(stack, "/v1/completions"))))
        whole = open_now.enter_context(closing(ask(stack, "/v1/completions", stream=False)))
        channel = open_now.enter_context(grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}"))
        request = pb.GenerateRequest(model="tiny", text="hello", max_tokens=200, ignore_eos=True)
        call = pb_grpc.GenerationStub(channel).Generate(request, timeout=60)
        wait_at_work(stack, 3)
        (door,) = front_doors(stack)
        os.kill(door, signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)) as broken:
            stream.read()
        assert events_of(getattr(broken.value, "partial", b"").decode()) == []
        with pytest.raises(ConnectionError):
            whole.getresponse()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: door not in front_doors(stack) and len(front_doors(stack)) == 1, "another to be started")
    stack.wait_ready()  # it has to hear from the planner first
    stack.wait_at_rest()
    assert stack.complete([1, 2, 3], 2)["choices"]
