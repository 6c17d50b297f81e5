"""What it costs a stream that its worker or its planner dies: the pause that its client sees.

    python -m benchmarks.stack.moves [--rounds 5] [--streams 16] [--prompt-tokens 1024] [--json]

A round is a stack of two workers of one thread, with streams that run; every other one has a beginning that all of
those have, which both workers hold. Then one of the two workers is killed (`worker`), the only planner (`planner`), or
one of two planners (`one_of_two_planners`). `pause_ms` is the longest time between two tokens of a stream from the kill
on; `before` is that of all streams before it. Of those that moved, as their records say, `held` are streams whose next
place had to compute less than a fifth of their prompt again, `computed` the others; `stayed` did not move, but share a
worker with those that came.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serve_model import VOCABULARY, model_folder
from coppice.errors import CoppiceError
from coppice_bench.report import describe_run, note, print_report, warn_if_busy
from coppice_bench.serve.side_by_side import spread
from coppice_bench.stack import MODEL_NAME, Stack, StackOptions, running

FIRST_ID = 1_000  # of tokens that are words
OUTPUT_TOKENS = 160
NUM_WARM = 4  # long prompts at once with the common beginning, before: too long for one worker to take them all
RUNNING_TOKENS = 40  # that each stream has before the kill
RECORD_S = 30.0
LOSSES = ("restarted", "moved")  # stages
HELD_SHARE = 0.2


class Client(threading.Thread):
    """Reads one stream and notes when its tokens come."""

    def __init__(self, stack: Stack, request_id: str, prompt: list[int], num_tokens: int = OUTPUT_TOKENS) -> None:
        super().__init__(daemon=True)
        self.stack = stack
        self.request_id = request_id
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.came_s: list[float] = []
        self.is_whole = False

    def run(self) -> None:
        body = {"model": MODEL_NAME, "prompt": self.prompt, "max_tokens": self.num_tokens, "ignore_eos": True}
        headers = {"content-type": "application/json", "x-request-id": self.request_id}
        connection = http.client.HTTPConnection(self.stack.host, self.stack.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, "temperature": 0}), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                self.came_s.append(time.monotonic())
            self.is_whole |= line.startswith(b"data: [DONE]")
        connection.close()

    def pause_ms(self, start_s: float, end_s: float) -> float:
        """The longest between two tokens of which the later one came in that time."""
        pairs = zip(self.came_s, self.came_s[1:], strict=False)
        return 1e3 * max((later - first for first, later in pairs if start_s < later <= end_s), default=0.0)


@dataclass(frozen=True)
class Pause:
    kind: str  # held, computed, stayed
    pause_ms: float
    computed_tokens: int  # again


def children(parent: int, module: str) -> Iterator[int]:
    """Processes below `parent` that run `module`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if above == parent and module.encode() in arguments:
            yield int(folder.name)


def kill_worker(stack: Stack) -> None:
    os.kill(stack.pids["worker-1"], signal.SIGKILL)


def kill_planner(stack: Stack) -> None:
    os.kill(next(children(stack.pids["scheduler"], "coppice_scheduler.edge.planner")), signal.SIGKILL)


CASES: dict[str, tuple[int, Callable[[Stack], None]]] = {  # planners, and what is killed
    "worker": (1, kill_worker),
    "planner": (1, kill_planner),
    "one_of_two_planners": (2, kill_planner),
}


def prompts(count: int, length: int, source: random.Random) -> list[list[int]]:
    """Every other one begins as all of those do."""
    common = source.choices(range(FIRST_ID, VOCABULARY), k=length - 16)
    own = [source.choices(range(FIRST_ID, VOCABULARY), k=length) for _ in range(count)]
    return [tokens if place % 2 else common + tokens[:16] for place, tokens in enumerate(own)]


def record_of(stack: Stack, name: str) -> dict[str, Any]:
    """Of a request that has ended. Raises CoppiceError if there is none."""
    deadline_s = time.monotonic() + RECORD_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{stack.operator_url}/requests/{name}", timeout=10) as answer:
                return dict(json.load(answer)["request"])
        except urllib.error.HTTPError:
            time.sleep(0.1)
    raise CoppiceError(f"the scheduler has no record of {name}")


def computed_again(record: dict[str, Any]) -> int | None:
    """Tokens that were computed after a loss. None: there was no loss."""
    kinds = [stage[0] for stage in record["stages"]]
    lost = next((place for place, kind in enumerate(kinds) if kind in LOSSES), None)
    if lost is None:
        return None
    return sum(int(stage[4]) for stage in record["stages"][lost:] if stage[0] == "prefill")


def round_of(stack: Stack, kill: Callable[[Stack], None], number: int, streams: int, length: int) -> list[Pause]:
    """Raises CoppiceError when a stream does not end whole."""
    asked = prompts(streams, length, random.Random(number))
    beginning = asked[0][: length - 16]
    long = [beginning + tokens + tokens[::-1] for tokens in asked[1 : 2 * NUM_WARM : 2]]
    warm = [Client(stack, f"warm-{number}-{place}", tokens, 1) for place, tokens in enumerate(long)]
    clients = [Client(stack, f"stream-{number}-{place}", tokens) for place, tokens in enumerate(asked)]
    for together in (warm, clients):
        for client in together:
            client.start()
        while together is clients and any(len(client.came_s) < RUNNING_TOKENS for client in clients):
            time.sleep(0.01)
        if together is clients:
            killed_s = time.monotonic()
            kill(stack)
        for client in together:
            client.join()
    if not all(client.is_whole for client in clients):
        raise CoppiceError("a stream was cut off")
    found = []
    for client in clients:
        again = computed_again(record_of(stack, client.request_id))
        pause_ms = client.pause_ms(killed_s, client.came_s[-1])
        kind = "stayed" if again is None else "held" if again < HELD_SHARE * length else "computed"
        found.append(Pause(kind, pause_ms, again or 0))
        usual_s = client.came_s[RUNNING_TOKENS // 2]
        found.append(Pause("before", client.pause_ms(usual_s, killed_s), 0))
    return found


def told(pauses: Sequence[Pause]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("before", "stayed", "held", "computed"):
        of_kind = [pause for pause in pauses if pause.kind == kind]
        if of_kind:
            found[kind] = {"streams": len(of_kind), "pause_ms": spread([pause.pause_ms for pause in of_kind])}
        if of_kind and kind in ("held", "computed"):
            found[kind]["tokens_computed_again"] = median(pause.computed_tokens for pause in of_kind)
    return found


def measure(model: Path, rounds: int, streams: int, length: int) -> dict[str, Any]:
    found: dict[str, list[Pause]] = {name: [] for name in CASES}
    for number in range(rounds):
        for name, (planners, kill) in CASES.items():
            note(f"round {number + 1} of {rounds}: {name}")
            options = StackOptions(model=model, workers=2, planners=planners, threads=1)
            with running(options) as stack:
                found[name] += round_of(stack, kill, number, streams, length)
    return {name: told(pauses) for name, pauses in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: that of serve_model.py")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        with model_folder(arguments.model) as model:
            cases = measure(model, arguments.rounds, arguments.streams, arguments.prompt_tokens)
    except CoppiceError as error:
        note(error.line())
        return 1
    sizes = {name: getattr(arguments, name) for name in ("rounds", "streams", "prompt_tokens")}
    print_report({"bench": "moves", **cases, **sizes, **describe_run()}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
