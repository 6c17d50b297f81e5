"""The attacker, a process of its own: attacks until its standard input ends, then prints what it was told.

    in:   {"phase": ..., "url": ..., "host": ..., "port": ..., "grpc_port": ..., "ca": ..., "key": ...}
    out:  attacks
    out:  {"200": 17, ...}

It runs at the lowest priority: it takes what the others leave of the processors, as if it were elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from benchmarks.attacks import over_grpc, over_rest, over_tcp
from coppice_bench.stack import Stack

Attack = Callable[["Target", Counter[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an attacker knows of a door. `ca` is empty where it does not speak TLS."""

    phase: str
    url: str
    host: str
    port: int
    grpc_port: int
    ca: str
    key: str

    @classmethod
    def of(cls, phase: str, stack: Stack, key: str) -> Target:
        ca = str(stack.ca or "")
        door = {"url": stack.url, "host": stack.host}
        return cls(phase=phase, **door, port=stack.port, grpc_port=stack.grpc_port, ca=ca, key=key)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


async def _nothing(target: Target, told: Counter[str]) -> None:
    """Of the calm."""


ATTACKS: dict[str, Attack] = {
    "calm": _nothing,
    "fair": over_rest.fair,
    "full": over_tcp.full,
    "texts": over_rest.texts,
    "ids": over_rest.ids,
    "refused": over_rest.refused,
    "strangers": over_rest.strangers,
    "answers": over_rest.answers,
    "bodies": over_tcp.bodies,
    "unread": over_tcp.unread,
    "idle": over_tcp.idle,
    "grammars": over_rest.grammars,
    "wrong_grammars": over_rest.wrong_grammars,
    "grpc_silent": over_grpc.silent,
    "grpc_flood": over_grpc.flood,
    "calm_tls": _nothing,
    "fair_tls": over_rest.fair,
    "handshakes": over_tcp.idle,
    "hellos": over_tcp.hellos,
}


async def attack(target: Target) -> None:
    told: Counter[str] = Counter()
    attacking = asyncio.ensure_future(ATTACKS[target.phase](target, told))
    print("attacks", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    if attacking.done():
        attacking.result()
    print(json.dumps(told), flush=True)
    attacking.cancel()


def main() -> None:
    os.nice(19)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(attack(Target(**json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
