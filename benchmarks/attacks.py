"""What one tenant can do to another's time to the first token, with one key and all that a client can send.

    coppice up --tenants FILE
    python benchmarks/attacks.py --url http://127.0.0.1:8000 --victim KEY --attacker KEY [--rounds 3] [--json]

The victim asks for a few tokens four times a second, as long as each phase lasts. The attacker, a process of its own:

    calm     nothing
    fair     ordinary requests, as many at once as its limits allow: its share of the chip, which is not an attack
    texts    1.9 MB of text to /tokenize, 8 at once, again and again
    ids      1.9 MB of token ids, 8 at once, again and again
    refused  wrong fields and prompts that are too long, 64 at once, again and again
    strangers  the same with a key that nobody has
    bodies   150 bodies of 2 MB that lack their end
    answers  64 calls for 128 answers each, at once, again and again
    unread   64 streams of many choices that are never read
    idle     10,000 connections that say nothing, or as many as the limit of open files allows

Phases take turns, `calm` before each of them, so that whatever else the machine does meets all alike. Printed are the
median and the 99th percentile of each, in milliseconds, how many of the victim's requests failed, and what the
attacker was told. All of them run on the same machine: the attacker runs at the lowest priority, so that it takes what
the others leave of the processors, as if it were elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from coppice_bench.report import describe_run, note, print_report, warn_if_busy

PHASES = ("calm", "fair", "texts", "ids", "refused", "strangers", "answers", "bodies", "unread", "idle")
EVERY_S = 0.25  # a request of the victim
NUM_BYTES = 1_900_000
SETTLE_S = 1.0  # what an attack left behind counts for it, for so long
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"


@dataclass
class Seen:
    """Of the victim, in one kind of phase."""

    first_token_ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        times = sorted(self.first_token_ms)
        if not times:
            return {"requests": 0, "failures": dict(self.failures)}
        place = min(len(times) - 1, round(0.99 * (len(times) - 1)))
        shown = {"requests": len(times), "p50_ms": statistics.median(times), "p99_ms": times[place]}
        return {**shown, "max_ms": times[-1], "failed": sum(self.failures.values()), "failures": dict(self.failures)}


async def ask_once(http: httpx.AsyncClient, model: str, number: int, seen: Seen) -> None:
    body = {"model": model, "prompt": f"{number} What does sorted do?", "max_tokens": 4, "stream": True}
    begin_s = time.monotonic()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                seen.failures[str(answer.status_code)] += 1
                return
            is_first = True
            async for line in answer.aiter_lines():
                if is_first and line.startswith("data: "):
                    seen.first_token_ms.append((time.monotonic() - begin_s) * 1e3)
                    is_first = False
    except httpx.HTTPError as error:
        seen.failures[type(error).__name__] += 1


async def be_a_victim(http: httpx.AsyncClient, model: str, seconds: float, seen: Seen, first: int) -> int:
    """Requests at fixed times, whether the ones before are answered or not. Returns the next number."""
    running: list[asyncio.Task[None]] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        running.append(asyncio.create_task(ask_once(http, model, first + len(running), seen)))
        await asyncio.sleep(EVERY_S)
    await asyncio.gather(*running)
    return first + len(running)


# ---- the attacker ----


class Attacker:
    def __init__(self, url: str, key: str, model: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._url = url
        self._key = key
        self._model = model
        self.told: Counter[str] = Counter()

    async def run(self, phase: str) -> None:
        if phase == "calm":
            await asyncio.sleep(3600)
        await getattr(self, f"_{phase}")()

    async def _fair(self) -> None:
        number = 0

        async def ask(http: httpx.AsyncClient) -> httpx.Response:
            nonlocal number
            number += 1
            body = {"model": self._model, "prompt": f"{number} A list is", "max_tokens": 64}
            return await http.post("/v1/completions", json=body)

        await self._closed_loop(16, self._key, ask)

    async def _texts(self) -> None:
        text = "the quick brown fox jumps over the lazy dog " * (NUM_BYTES // 44)
        await self._post(8, self._key, "/tokenize", json.dumps({"model": self._model, "prompt": text}))

    async def _ids(self) -> None:
        ids = [100 + number * 7919 % 3900 for number in range(NUM_BYTES // 5)]
        await self._post(8, self._key, "/v1/completions", json.dumps({"model": self._model, "prompt": ids}))

    async def _refused(self) -> None:
        wrong = json.dumps({"model": self._model, "prompt": "x " * 20_000, "max_tokens": 1})
        await self._post(64, self._key, "/v1/completions", wrong)

    async def _strangers(self) -> None:
        await self._post(64, "nobody", "/v1/completions", json.dumps({"model": self._model, "prompt": "x"}))

    async def _answers(self) -> None:
        many = json.dumps({"model": self._model, "prompt": [[5]] * 128, "max_tokens": 1})
        await self._post(64, self._key, "/v1/completions", many)

    async def _bodies(self) -> None:
        whole = HEAD.format(self._key, NUM_BYTES + 100_000).encode() + b'{"prompt":"' + b"x" * NUM_BYTES
        await self._hold(150, whole)

    async def _unread(self) -> None:
        body = {"model": self._model, "prompt": ["x"] * 8, "n": 4, "max_tokens": 400, "stream": True}
        raw = json.dumps(body).encode()
        await self._hold(64, HEAD.format(self._key, len(raw)).encode() + raw)

    async def _idle(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        await self._hold(min(10_000, soft - 100), b"")

    async def _post(self, at_once: int, key: str, path: str, body: str) -> None:
        await self._closed_loop(at_once, key, lambda http: http.post(path, content=body))

    async def _closed_loop(
        self, at_once: int, key: str, ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]
    ) -> None:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=at_once)

        async def again_and_again(http: httpx.AsyncClient) -> None:
            while True:
                try:
                    self.told[str((await ask(http)).status_code)] += 1
                except httpx.HTTPError as error:
                    self.told[type(error).__name__] += 1
                    await asyncio.sleep(0.05)

        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60, limits=limits) as http:
            await asyncio.gather(*(again_and_again(http) for _ in range(at_once)))

    async def _hold(self, count: int, raw: bytes) -> None:
        """So many connections that send this and read nothing; another for each that the server closes."""
        opening = asyncio.Semaphore(50)
        loop = asyncio.get_running_loop()

        async def keep_one() -> None:
            while True:
                with socket.socket() as connection:
                    connection.setblocking(False)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    try:
                        async with opening:
                            await loop.sock_connect(connection, self._address)
                        await loop.sock_sendall(connection, raw)
                        self.told["held"] += 1
                        while not is_closed(connection):
                            await asyncio.sleep(1.0)
                        self.told["closed"] += 1
                    except OSError:
                        self.told["refused"] += 1
                        await asyncio.sleep(0.2)

        await asyncio.gather(*(keep_one() for _ in range(count)))


def is_closed(connection: socket.socket) -> bool:
    """By the other end. Nothing is read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def attack(url: str, key: str, model: str, phase: str) -> None:
    """Until stdin ends; then a line of what was told."""
    attacker = Attacker(url, key, model)
    attacking = asyncio.create_task(attacker.run(phase))
    print("attacks", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    if attacking.done():
        attacking.result()
    print(json.dumps(attacker.told), flush=True)
    attacking.cancel()


# ---- both ----


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    seen = {phase: Seen() for phase in PHASES}
    told: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    headers = {"Authorization": f"Bearer {arguments.victim}"}
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=60) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        number = await be_a_victim(http, model, 3.0, Seen(), 0)  # the first requests are slower
        for turn in range(arguments.rounds):
            for phase in [step for attack in arguments.phases.split(",") for step in ("calm", attack)]:
                note(f"round {turn + 1} of {arguments.rounds}: {phase}")
                command = [sys.executable, __file__, "--url", arguments.url, "--attacker", arguments.attacker]
                with subprocess.Popen(
                    [*command, "--attack", phase, "--model", model], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                ) as attacker:
                    assert attacker.stdin is not None
                    assert attacker.stdout is not None
                    await asyncio.to_thread(attacker.stdout.readline)
                    number = await be_a_victim(http, model, arguments.seconds, seen[phase], number)
                    attacker.stdin.close()
                    told[phase] += Counter(json.loads(await asyncio.to_thread(attacker.stdout.readline)))
                    attacker.kill()
                await asyncio.sleep(SETTLE_S)
    phases = {name: {**seen[name].summary(), "told": dict(told[name])} for name in PHASES if seen[name].first_token_ms}
    fair = phases.get("fair", {}).get("p99_ms")
    for shown in phases.values():
        if fair and "p99_ms" in shown:
            shown["p99_over_fair"] = shown["p99_ms"] / fair
    return {"seconds": arguments.seconds, "rounds": arguments.rounds, **describe_run(), "phases": phases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--victim", default="", help="an API key")
    parser.add_argument("--attacker", required=True, help="an API key of another tenant")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phases", default=",".join(PHASES[1:]), help="which of them, with commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attack", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        os.nice(19)
        asyncio.run(attack(arguments.url, arguments.attacker, arguments.model, arguments.attack))
        return 0
    warn_if_busy()
    try:
        report = asyncio.run(measure(arguments))
    except httpx.HTTPError as error:
        note(f"{arguments.url} does not answer as it should: {error}; start it with: coppice up --tenants FILE")
        return 1
    print_report(report, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
