"""Front doors as processes: one dies, all of them end in order, none is left behind, their metrics are one."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice_rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.stack import STOP_S, Stack
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide

LONG = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


def front_doors(stack: Stack) -> list[int]:
    """Process ids of those that live."""
    return children(stack, "coppice_scheduler.edge.door")


def children(stack: Stack, module: str) -> list[int]:
    """Process ids of what the scheduler started with `-m module`, and lives."""
    process = stack.services["scheduler"].process
    assert process is not None
    pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == process.pid]
    return [pid for pid in pids if module.encode() in _command(pid)]


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """0 for a process that is gone, or dead and not yet buried."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


def lives(pid: int) -> bool:
    return parent_of(pid) != 0


@contextmanager
def stream(stack: Stack, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """An answer of which one event was read."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, **fields}), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    while (line := response.readline()).startswith((b":", b"\n")):
        pass  # comments of a stream that waits
    assert line.startswith(b"data: {")
    yield response
    connection.close()


def rest_of(response: http.client.HTTPResponse) -> list[str]:
    """The events that are left; nothing of the last one where the connection broke."""
    try:
        raw = response.read()
    except http.client.IncompleteRead as broken:
        raw = broken.partial
    except ConnectionError:
        raw = b""
    return [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data:")]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(checkpoint, tmp_path_factory.mktemp("stack"), scheduler_args=["--front-doors=2"]) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """With a planner and two front doors, whatever became of those of the test before."""
    scheduler = running.services["scheduler"]
    if not scheduler.is_running:
        scheduler.start()
        running.wait_ready()
    wait_for(lambda: set(front_doors(running)) <= started(running) and len(front_doors(running)) == 2, "both")
    running.wait_at_rest()
    return running


def started(stack: Stack) -> set[int]:
    """Process ids of all front doors that ever served."""
    return set(map(int, re.findall(r"Started server process \[(\d+)\]", stack.services["scheduler"].log.read_text())))


def successes(stack: Stack) -> float:
    return stack.metric(stack.port, "vllm:request_success_total")


def test_a_front_door_dies(stack: Stack) -> None:
    first, second = front_doors(stack)
    stack.complete([1, 2, 3], 2)
    before = successes(stack)
    for _ in range(5):
        stack.complete([1, 2, 3], 2)
    assert successes(stack) == before + 5
    # Both have the listener: whoever accepts the streams, killing one kills some and leaves the rest alone.
    with stream(stack) as one, stream(stack) as two, stream(stack) as three:
        os.kill(first, signal.SIGKILL)
        endings = [rest_of(response)[-1:] for response in (one, two, three)]
        assert all(ending in ([], ["[DONE]"]) or ending[0].startswith("{") for ending in endings)
    wait_for(lambda: len(front_doors(stack)) == 2 and first not in front_doors(stack), "another to be started")
    assert lives(second)
    stack.wait_at_rest()
    complete = sum(ending == ["[DONE]"] for ending in endings)
    for _ in range(5):
        stack.complete([1, 2, 3], 2)
    assert successes(stack) == before + 10 + complete, "what the dead one counted is lost"
    for _ in range(4):
        with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
            request = scheduler_pb2.GenerateRequest(model="tiny", text="hello", max_tokens=2, ignore_eos=True)
            assert list(scheduler_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60))


def door_of(stack: Stack, connection: http.client.HTTPConnection) -> int:
    """Process id of the front door that has the other end of it."""
    ours = connection.sock.getsockname()[1]
    (inode,) = [
        words[9]
        for words in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if (words[1].rpartition(":")[2], words[2].rpartition(":")[2]) == (f"{stack.port:04X}", f"{ours:04X}")
    ]
    (door,) = [pid for pid in front_doors(stack) if f"socket:[{inode}]" in links_of(pid)]
    return door


def links_of(pid: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]


def connections_to_each(stack: Stack) -> dict[int, http.client.HTTPConnection]:
    """One that is open to each of the two front doors; which of them takes a connection is chance."""
    found: dict[int, http.client.HTTPConnection] = {}
    while len(found) < 2:
        connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        found.setdefault(door_of(stack, connection), connection)
    return found


def test_an_abort_by_the_other_front_door_ends_a_stream(stack: Stack) -> None:
    held, other = connections_to_each(stack).values()
    headers = {"content-type": "application/json", "x-request-id": "job-7"}
    for asked in ("job-7", "the answer's"):
        held.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 1500, "n": 2}), headers)
        response = held.getresponse()
        while not (line := response.readline()).startswith(b"data: "):
            pass
        asked = json.loads(line.removeprefix(b"data: "))["id"] if asked != "job-7" else asked
        other.request("POST", f"/v1/requests/{asked}/abort")
        answer = other.getresponse()
        assert (answer.status, json.loads(answer.read())["num_answers"]) == (200, 2)
        assert json.loads(rest_of(response)[-1])["error"]["code"] == "request_aborted"
        stack.wait_at_rest()  # all blocks are back
        other.request("POST", f"/v1/requests/{asked}/abort")
        gone = other.getresponse()
        assert (gone.status, json.loads(gone.read())["error"]["code"]) == (404, "request_not_found")
    for connection in (held, other):
        connection.close()


@pytest.mark.long
def test_a_front_door_that_hangs_is_replaced(stack: Stack) -> None:
    hanging = front_doors(stack)[0]
    os.kill(hanging, signal.SIGSTOP)
    wait_for(lambda: not lives(hanging) and len(front_doors(stack)) == 2, "it to be replaced")
    assert "said nothing for" in stack.services["scheduler"].log.read_text()
    assert stack.complete([1, 2, 3], 2)["choices"]


def test_a_stop_lets_streams_end_and_leaves_nobody(stack: Stack) -> None:
    doors = [*front_doors(stack), *children(stack, "coppice_scheduler.edge.planner")]
    with stream(stack, max_tokens=40) as response:
        stack.services["scheduler"].signal(signal.SIGTERM)
        assert rest_of(response)[-1] == "[DONE]"
    process = stack.services["scheduler"].process
    assert process is not None
    assert process.wait(STOP_S) == 0
    assert not any(map(lives, doors))


def test_they_are_killed_with_the_process_group_and_deaf_to_a_ctrl_c(stack: Stack) -> None:
    planner = stack.services["scheduler"].process
    assert planner is not None
    doors = front_doors(stack)
    assert [os.getpgid(door) for door in doors] == [os.getpgid(planner.pid)] * len(doors)
    for door in doors:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(door, number)
    with stream(stack) as response:
        assert rest_of(response)[-1] == "[DONE]"
    assert front_doors(stack) == doors


def test_a_stop_in_the_middle_of_a_long_stream_ends_it_with_an_error(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = stack.services["scheduler"]
    scheduler.stop()
    hasty = replace(scheduler, argv=[*scheduler.argv, "--drain-s=0", "--front-doors=1"])
    monkeypatch.setitem(stack.services, "scheduler", hasty)
    hasty.start()
    try:
        stack.wait_ready()
        with stream(stack, max_tokens=1500, prompt=[5]) as response:
            hasty.signal(signal.SIGTERM)
            error = json.loads(rest_of(response)[-1])["error"]
        assert error["code"] == "scheduler_lost"
        assert "shut down" in error["message"]
    finally:
        assert hasty.stop() == 0


def test_a_stop_waits_for_nobody_who_only_watches_or_owes_a_part_of_a_request(stack: Stack) -> None:
    """Before their time was over they would be cut off all the same, in the middle of the server's end."""
    scheduler = stack.services["scheduler"]
    process, said_before = scheduler.process, len(scheduler.log.read_text())
    assert process is not None
    with (
        grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel,
        socket.create_connection(("127.0.0.1", stack.port), timeout=60) as owing,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        owing.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        stack.complete([1, 2, 3], 2)
        scheduler.signal(signal.SIGTERM)
        assert [answer.status for answer in watch][-1:] in ([], [health_pb2.HealthCheckResponse.NOT_SERVING])
        assert watch.code() is grpc.StatusCode.OK
        assert owing.recv(1) == b""
        assert process.wait(STOP_S) == 0
    assert "Traceback" not in scheduler.log.read_text()[said_before:]


def test_a_message_of_many_megabytes_is_not_read(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        request = scheduler_pb2.TokenizeRequest(model="tiny", text="a" * (5 << 20))
        with pytest.raises(grpc.RpcError, match="larger than max"):
            scheduler_pb2_grpc.GenerationStub(channel).Tokenize(request, timeout=60)


def metrics_folder(pid: int) -> Path:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return Path(next(word for word in variables if word.startswith("PROMETHEUS_MULTIPROC_DIR=")).partition("=")[2])


def test_nothing_outlives_the_parent(stack: Stack) -> None:
    doors = front_doors(stack)
    processes = [*doors, *children(stack, "coppice_scheduler.edge.planner")]
    assert len(processes) == 3
    folder = metrics_folder(doors[0])
    assert folder.is_dir()
    with stream(stack) as response:
        stack.services["scheduler"].kill()
        last = rest_of(response)[-1]
        assert json.loads(last)["error"]["code"] == "scheduler_lost"
    wait_for(lambda: not any(map(lives, processes)), "its processes to end")
    assert not folder.exists()
    stack.services["scheduler"].start()
    stack.wait_ready()
    assert stack.complete([1, 2, 3], 2)["choices"]


def test_a_port_that_is_taken_is_said(stack: Stack, tmp_path: Path) -> None:
    scheduler = stack.services["scheduler"]
    argv = [word for word in scheduler.argv if not word.startswith("--port=")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flag, port in (("--grpc-port", stack.grpc_port), ("--port", taken.getsockname()[1])):
            log = tmp_path / f"second{flag}"
            second = type(scheduler)("second", [*argv, "--port=0", f"{flag}={port}"], log)
            second.start()
            assert second.process is not None
            assert second.process.wait(STOP_S) == 1
            assert flag in log.read_text()
