"""Thousands of connections that say nothing, hundreds of streams in the queue, a client that never reads: memory stays
bounded, nobody is turned away without a word, and whoever asks meanwhile is served."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coppice_scheduler.edge.frontend.body_budget import CALLS_MAX
from tests.e2e.stack import Stack
from tests.e2e.test_front_doors import front_doors
from tests.fakes.waiting import wait_for

MIB = 1024  # of /proc's KiB
ASK = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}


def request_bytes(**fields: object) -> bytes:
    body = json.dumps({**ASK, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def stream(port: int, limit: asyncio.Semaphore) -> bytes:
    async with limit:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes())
        await writer.drain()
        begin = await reader.read(1)
    answer = begin + await reader.read()
    writer.close()
    return answer


async def streams(port: int, count: int) -> list[bytes]:
    limit = asyncio.Semaphore(CALLS_MAX // 2)  # that wait for their answers to begin; of as many more none is refused
    return list(await asyncio.gather(*(stream(port, limit) for _ in range(count))))


@contextmanager
def idle_clients(port: int, count: int, log: Path) -> Iterator[None]:
    """`count` connections from a process of its own, all open when the block begins; none may ever be refused."""

    def last_words() -> list[int]:
        lines = log.read_text().splitlines()
        return [int(word) for word in lines[-1].split()] if lines else [0, 0]

    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.api.idle_clients", str(port), str(count)], stdout=out
        )
    try:
        # Those that are closed at their time limit are opened anew, so a few are always missing.
        wait_for(lambda: last_words()[0] >= 0.9 * count, f"{count} connections", 120)
        yield
        assert last_words()[1] == 0, "connections were refused"
    finally:
        process.kill()
        process.wait()


def memory_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def never_reads(port: int) -> socket.socket:
    """A client that asks for more than buffers hold, and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request_bytes(max_tokens=1500, return_token_ids=True))
    return client


def check(stack: Stack, tmp_path: Path, num_idle: int, num_streams: int, memory_mib: int) -> None:
    (door,) = front_doors(stack)
    planner = stack.services["scheduler"].process
    assert planner is not None
    before = {pid: memory_kib(pid) for pid in (door, planner.pid)}
    with ExitStack() as open_:
        open_.callback(never_reads(stack.port).close)
        for place in range(2):
            open_.enter_context(idle_clients(stack.port, num_idle // 2, tmp_path / f"idle-{place}"))
        assert stack.complete([4, 5, 6], 3)["choices"], "served among idle connections"
        answers = asyncio.run(streams(stack.port, num_streams))
        assert [answer for answer in answers if b"[DONE]" not in answer] == []
        after = {pid: memory_kib(pid) for pid in before}
    print({pid: (before[pid] // MIB, after[pid] // MIB) for pid in before})
    grown = {pid: (after[pid] - before[pid]) // MIB for pid in before}
    assert max(grown.values()) < memory_mib, f"grew by {grown} MiB"
    log = stack.services["scheduler"].log.read_text()
    assert "out of system resource" not in log, "accept failed"
    assert "is started" not in log, "a front door was replaced"


@pytest.mark.long
def test_hundreds(checkpoint: Path, tmp_path: Path) -> None:
    with Stack(checkpoint, tmp_path, scheduler_args=["--max-running=8"]) as stack:
        check(stack, tmp_path, num_idle=500, num_streams=200, memory_mib=60)


@pytest.mark.long
def test_thousands(checkpoint: Path, tmp_path: Path) -> None:
    with Stack(checkpoint, tmp_path, scheduler_args=["--max-running=64", "--max-queued=3000"]) as stack:
        check(stack, tmp_path, num_idle=10_000, num_streams=2_000, memory_mib=300)
