"""How long large calls of one tenant hold up the loop of a front door, and what unfinished bodies take of its memory.

A front door over an engine that answers at once runs in this process, the client in another one. Prints the longest
times between two turns of the loop; with `--json` one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

import coppice
from coppice.garbage import shorten_pauses
from coppice.tenants.directory import TenantDirectory
from coppice_scheduler.core.state.request import Finish, Output, OutputError, Request, SchedulerStats
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.idempotency import Claimed, FirstOutcome
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import MAX_PROMPTS
from coppice_scheduler.edge.http_server import HttpServer
from coppice_scheduler.edge.rest_app import create_app
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text

MODEL = "demo"
DEMO_CHECKPOINT = Path(coppice.__file__).parent / "demo_model"
NUM_BYTES = 1_900_000
LOOK_S = 0.001
NUM_BODIES = 150
BODIES_S = 15.0
LOADS = ("bias", "ids", "texts", "answers")
NUM_CALLS = 100  # of many answers each


@dataclass
class OneToken:
    """An engine that answers every request with one token."""

    model: ModelInfo
    ready: bool = True
    accepts: bool = True
    tenants_refused: bool = False

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        yield Output(request.request_id, bytes(4), finish=Finish.LENGTH, num_output_tokens=1)

    def finish(self, request_id: str) -> None:
        """Nothing runs on."""

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        return 0

    def end(self, request_id: str, error: OutputError) -> None:
        """Likewise."""

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
        raise NotImplementedError  # no call has a key

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def calls_of(load: str) -> tuple[str, list[str]]:
    """The path, and the bodies that are sent at once."""
    if load == "texts":
        text = "the quick brown fox jumps over the lazy dog " * (NUM_BYTES // 44 + 1)
        return "/tokenize", [json.dumps({"prompt": text[place:NUM_BYTES]}) for place in range(8)]
    asked: dict[str, object] = {"model": MODEL, "max_tokens": 1, "prompt": "x"}
    if load == "answers":
        asked["prompt"] = [[5]] * MAX_PROMPTS
        return "/v1/completions", [json.dumps(asked)] * NUM_CALLS
    if load == "ids":
        asked["prompt"] = [100 + number * 7919 % 3900 for number in range(NUM_BYTES // 5)]
    else:
        asked["logit_bias"] = {f"{number:06d}": 1 for number in range(NUM_BYTES // 11)}
    return "/v1/completions", [json.dumps(asked, separators=(",", ":"))]


async def send(url: str, load: str) -> None:
    path, bodies = calls_of(load)
    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(http.post(url + path, content=body) for body in bodies))


async def longest_stalls_ms(url: str, load: str) -> list[int]:
    """The three longest times that the loop had no turn while another process sent the load."""
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, "--send", url, load)
    sent = asyncio.create_task(client.wait())
    stalls, last_s = [], time.monotonic()
    while not sent.done():
        await asyncio.sleep(LOOK_S)
        now_s = time.monotonic()
        stalls.append(now_s - last_s - LOOK_S)
        last_s = now_s
    return [round(stall_s * 1000) for stall_s in sorted(stalls)[:-4:-1]]


async def mebibytes_of_unfinished_bodies(port: int) -> tuple[int, int]:
    """Memory of this process before and after as many clients sent all but the end of a body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
    whole = memoryview(head + b'{"prompt":"' + b"x" * 1_990_000)
    before, left = _resident_mib(), {}
    for _ in range(NUM_BODIES):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        left[connection] = whole
        await asyncio.sleep(0)
    end_s = time.monotonic() + BODIES_S
    while time.monotonic() < end_s and any(left.values()):
        for connection, rest in left.items():
            try:
                left[connection] = rest[connection.send(rest[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                left[connection] = whole[:0]  # it was refused and closed
        await asyncio.sleep(0)
    after = _resident_mib()
    for connection in left:
        connection.close()
    return before, after


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


async def measure(*, as_json: bool) -> None:
    engine = OneToken(ModelInfo(MODEL, 1 << 20, 1))
    metrics = FrontDoorMetrics(CollectorRegistry(), MODEL)
    frontdoor = FrontDoor(engine, load_checkpoint_text(DEMO_CHECKPOINT), TenantDirectory.single_default(), metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(create_app(frontdoor, None), "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    shorten_pauses()  # as a front door does
    port = listener.getsockname()[1]
    before, after = await mebibytes_of_unfinished_bodies(port)
    found: dict[str, object] = {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    found["unfinished_bodies_mib"] = [before, after]
    for load in LOADS:
        found[f"{load}_stalls_ms"] = await longest_stalls_ms(f"http://127.0.0.1:{port}", load)
    server.should_exit = server.force_exit = True
    await serving
    print(json.dumps(found) if as_json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("--send", nargs=2, metavar=("URL", "LOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(send(*arguments.send) if arguments.send else measure(as_json=arguments.json))


if __name__ == "__main__":
    main()
