"""What TLS costs: throughput under load and the first token on an idle stack, with TLS on every edge beside none.

    python -m benchmarks.stack.tls_cost [--rounds 9] [--requests 100] [--load 64] [--model FOLDER] [--json]

Two stacks stand side by side: cache, worker and scheduler over TCP, without TLS; and the same with mutual TLS on all
sessions and TLS for clients, certificates on curve P-256. Only one of them has work at a time. A round is

    idle    single requests, one to either stack in turns, on connections that are kept: `requests` to each
    fresh   the same on a new connection for each request, which is one handshake more
    load    `load` requests of 256 + 64 tokens, 32 at once, to one stack and then to the other; who begins, changes

Of a round the median of its times to the first token counts, and its output tokens per second. `added_ms` is the median
over rounds of TLS minus none, `ratio` that of TLS over none, each with the quartiles and ends of its rounds beside it.
`within` says whether they keep to 0.3 ms and 3 percent. The first round warms up and is left out.

Our client shares the processors with the stack and does TLS as well. `cpu_us_per_token` tells processor time of a load
for an output token, by process: what TLS added to the scheduler and its front doors is ours, what it added to the
client is not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serve_model import model_folder
from coppice.errors import CoppiceError
from coppice_bench.processor_time import tree_time_s
from coppice_bench.report import describe_run, note, print_report, warn_if_busy
from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.http import Endpoint, HttpClient
from coppice_bench.serve.load.prompts import Bodies, Content, Model
from coppice_bench.serve.load.records import record_of
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.side_by_side import prepared, run_load, spread
from coppice_bench.stack import MODEL_NAME, Stack, StackOptions, running

NONE, TLS = "none", "tls"
ADDED_MS_MAX = 0.3
LOST_SHARE_MAX = 0.03
PROMPT_TOKENS = 64
PAUSE_S = 0.01  # before a single request: the stack is idle again
SETTLE_S = 1.0  # after a load
_TIMEOUT_S = 60.0


@dataclass
class Rounds:
    """Of one stack, a value for each round: medians in ms, output tokens per second."""

    idle_ms: list[float] = field(default_factory=list)
    fresh_ms: list[float] = field(default_factory=list)
    output_tok_s: list[float] = field(default_factory=list)
    cpu_us_per_token: dict[str, list[float]] = field(default_factory=dict)  # by process


class Asker:
    """Single requests to one stack, each with a prompt that nobody sent before."""

    def __init__(self, stack: Stack) -> None:
        self._endpoint = Endpoint.parse(stack.url)
        self._client = HttpClient(self._endpoint)
        self._bodies = Bodies(MODEL_NAME, "completions", 0.0)
        self._content = Content(secrets.randbits(62), Model(MODEL_NAME), as_ids=True)
        self._number = 0

    async def ttft_ms(self, *, is_fresh: bool) -> float:
        """`is_fresh`: on a new connection. Raises CoppiceError for whatever is no answer."""
        self._number += 1
        body = self._bodies.single(self._content.run(0, self._number, PROMPT_TOKENS), 2)
        request = self._endpoint.request("POST", self._bodies.path, body)
        await asyncio.sleep(PAUSE_S)
        if is_fresh:
            self._client.close()
        answer, sent_s = Answer(), time.monotonic()
        try:
            await self._client.send(request, answer, _TIMEOUT_S)
        except OSError as error:
            raise CoppiceError(f"a stack does not answer: {error!r}") from error
        record = record_of(answer, sender=0, due_s=sent_s, sent_s=sent_s, now_s=time.monotonic())
        if not record.is_ok:
            raise CoppiceError(f"a request failed ({record.outcome}): {record.message}")
        return record.ttft_ms

    def close(self) -> None:
        self._client.close()


async def single_requests(stacks: dict[str, Stack], count: int, *, is_fresh: bool) -> dict[str, float]:
    """Medians of the times to the first token, by stack; the stacks take turns with every request."""
    askers = {name: Asker(stack) for name, stack in stacks.items()}
    times: dict[str, list[float]] = {name: [] for name in stacks}
    for asker in askers.values():
        await asker.ttft_ms(is_fresh=True)
    for number in range(count):
        for name in list(askers) if number % 2 else reversed(list(askers)):
            times[name].append(await askers[name].ttft_ms(is_fresh=is_fresh))
    for asker in askers.values():
        asker.close()
    return {name: median(found) for name, found in times.items()}


@dataclass(frozen=True, slots=True)
class Load:
    output_tok_s: float
    cpu_us_per_token: dict[str, float]


def under_load(stack: Stack, requests: int) -> Load:
    """Raises CoppiceError when a request fails."""
    options = ServeOptions(url=stack.url, requests=requests, concurrency=32, input_tokens=256, output_tokens=64)
    part = prepared(options)
    before_s = {name: tree_time_s(pid) for name, pid in stack.pids.items()}
    found, gathered = run_load(part)
    cpu_s = {name: tree_time_s(pid) - before_s[name] for name, pid in stack.pids.items()}
    cpu_s["client"] = gathered.client_cpu_s
    if found["errors"]:
        raise CoppiceError(f"the load failed: {found['errors']}")
    num_tokens = found["requests"] * found["output_tokens_mean"]
    return Load(float(found["output_tok_s"]), {name: spent * 1e6 / num_tokens for name, spent in cpu_s.items()})


def measure(stacks: dict[str, Stack], rounds: int, requests: int, load: int) -> dict[str, Rounds]:
    found = {name: Rounds() for name in stacks}
    for number in range(rounds + 1):
        note(f"round {number} of {rounds}" + ("" if number else ", which warms up"))
        idle = asyncio.run(single_requests(stacks, requests, is_fresh=False))
        fresh = asyncio.run(single_requests(stacks, requests, is_fresh=True))
        loads = {}
        for name in list(stacks) if number % 2 else reversed(list(stacks)):
            loads[name] = under_load(stacks[name], load)
            time.sleep(SETTLE_S)
        if number:
            for name, of_stack in found.items():
                of_stack.idle_ms.append(idle[name])
                of_stack.fresh_ms.append(fresh[name])
                of_stack.output_tok_s.append(loads[name].output_tok_s)
                for process, spent_us in loads[name].cpu_us_per_token.items():
                    of_stack.cpu_us_per_token.setdefault(process, []).append(spent_us)
    return found


def compared(none: Rounds, tls: Rounds) -> dict[str, Any]:
    """Round by round: neighbours in time are compared, so what the machine does besides falls on both."""
    added = {
        name: spread([late - early for early, late in zip(before, after, strict=True)])
        for name, before, after in (("idle", none.idle_ms, tls.idle_ms), ("fresh", none.fresh_ms, tls.fresh_ms))
    }
    ratio = spread([b / a for a, b in zip(none.output_tok_s, tls.output_tok_s, strict=True)])
    return {
        "idle": {"none_ms": median(none.idle_ms), "tls_ms": median(tls.idle_ms), "added_ms": added["idle"]},
        "fresh": {"none_ms": median(none.fresh_ms), "tls_ms": median(tls.fresh_ms), "added_ms": added["fresh"]},
        "load": {
            "none_output_tok_s": median(none.output_tok_s),
            "tls_output_tok_s": median(tls.output_tok_s),
            "ratio": ratio,
            "cpu_us_per_token": {
                process: {"none": median(before), "tls": median(tls.cpu_us_per_token[process])}
                for process, before in none.cpu_us_per_token.items()
            },
        },
        "within": {
            "idle": added["idle"]["median"] <= ADDED_MS_MAX,
            "load": ratio["median"] >= 1 - LOST_SHARE_MAX,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=100, help="single ones to each stack, in a round and kind")
    parser.add_argument("--load", type=int, default=64, help="requests of a load")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: that of serve_model.py")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        with ExitStack() as held:
            model = held.enter_context(model_folder(arguments.model))
            note("the stacks start")
            none = held.enter_context(running(StackOptions(model=model)))
            tls = held.enter_context(running(StackOptions(model=model, services_tls=True, public_tls=True)))
            os.environ["SSL_CERT_FILE"] = str(tls.ca)  # whom our clients trust from now on
            found = measure({NONE: none, TLS: tls}, arguments.rounds, arguments.requests, arguments.load)
    except CoppiceError as error:
        note(error.line())
        return 1
    sizes = {"rounds": arguments.rounds, "requests": arguments.requests, "load_requests": arguments.load}
    report = {"bench": "tls_cost", **compared(found[NONE], found[TLS]), **sizes, **describe_run()}
    print_report(report, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
