"""Loads as lanes of jobs: who sends what, when, and how many at once.

    random     unshared prompts
    prefix     --prefixes beginnings of --shared-tokens, each followed by a tail of its own
    multiturn  conversations that grow: beginning, then question, the server's own answer, question ...
    trace      arrivals, lengths and shared blocks of a real trace
    tenants    the same work from each tenant, in a lane of its own; a flooder fills its lane until the others end

A job of number n goes to the client process n mod processes; all of them make the same jobs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coppice.errors import UsageError
from coppice_bench.arrivals import TRACE_BLOCK_TOKENS, Arrival
from coppice_bench.serve.load.prompts import Content, Run
from coppice_bench.serve.load.traces import read_trace
from coppice_bench.serve.options import ServeOptions

_PREFIX, _TAIL, _BLOCK = range(3)  # kinds of runs
_FLOOD_FIRST = 1 << 32  # numbers of a flooder's prompts begin here


@dataclass(frozen=True, slots=True)
class Turn:
    run: Run
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request, or the turns of one conversation, one after another. `at_s` counts from the start; open loop."""

    sender: int
    turns: tuple[Turn, ...]
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lane:
    """Jobs in order. With `concurrency` 0 each starts at its own time; else so many run at once."""

    name: str
    jobs: Iterable[Job]
    concurrency: int
    is_flood: bool = False


class Loads:
    """Makes the lanes of one client process."""

    def __init__(self, options: ServeOptions, content: Content, context: int, process: int = 0) -> None:
        self._options = options
        self._content = content
        self._context = context
        self._process = process
        self.num_clipped = 0

    def lanes(self) -> list[Lane]:
        options = self._options
        if options.load == "tenants":
            return [self._tenant_lane(number) for number in range(len(options.senders))]
        jobs = self._arriving() if options.load == "trace" else self._jobs(options.requests)
        mine = list(jobs)[self._process :: options.processes]
        is_open = options.load == "trace" or options.rate > 0
        return [Lane("all", mine, 0 if is_open else self._share(options.concurrency))]

    def _tenant_lane(self, number: int) -> Lane:
        options, sender = self._options, self._options.senders[number]
        first = number * options.requests
        if sender.floods:
            start = _FLOOD_FIRST * (number + 1)
            flood = (self._job(number, start + step) for step in itertools.count(self._process, options.processes))
            return Lane(sender.name, flood, self._share(options.flood), is_flood=True)
        moments = self._moments(options.requests, seed=number)
        jobs = [self._job(number, first + step, at_s) for step, at_s in enumerate(moments)]
        mine = jobs[self._process :: options.processes]
        return Lane(sender.name, mine, 0 if options.rate else self._share(options.concurrency))

    def _share(self, number: int) -> int:
        """This process's share of a number of places."""
        return number // self._options.processes + (self._process < number % self._options.processes)

    def _jobs(self, count: int) -> Iterator[Job]:
        senders = len(self._options.senders)
        for number, at_s in enumerate(self._moments(count)):
            yield self._job(number % senders, number, at_s)

    def _moments(self, count: int, seed: int = 0) -> Iterator[float]:
        """Arrivals of a Poisson process; all at 0 in a closed loop."""
        source = random.Random(self._options.seed * 1_000_003 + seed)
        at_s = 0.0
        for _ in range(count):
            at_s += source.expovariate(self._options.rate) if self._options.rate else 0.0
            yield at_s

    def _job(self, sender: int, number: int, at_s: float = 0.0) -> Job:
        options, content = self._options, self._content
        if options.load == "multiturn":
            first = content.run(_PREFIX, 0, max(1, options.shared_tokens))
            asked = [
                content.run(_TAIL, number * options.turns + turn, options.input_tokens) for turn in range(options.turns)
            ]
            asked[0] = first + asked[0]
            return Job(sender, tuple(Turn(run, options.output_tokens) for run in asked), at_s)
        shared = options.shared_tokens if options.load == "prefix" else 0
        tail = content.run(_TAIL, number, options.input_tokens - shared)
        run = content.run(_PREFIX, number % options.prefixes, shared) + tail if shared else tail
        return Job(sender, (Turn(run, options.output_tokens),), at_s)

    def _arriving(self) -> Iterator[Job]:
        options = self._options
        assert options.trace is not None
        senders = len(options.senders)
        for number, arrival in enumerate(read_trace(options.trace, options.limit)):
            turn = self._arrived(number, arrival)
            yield Job(number % senders, (turn,), arrival.at_ms / 1e3 / options.speed)

    def _arrived(self, number: int, arrival: Arrival) -> Turn:
        """Lengths divided by `--shrink`, and cut to what the model's context takes."""
        shrink = self._options.shrink
        wanted, output = max(1, arrival.input_tokens // shrink), max(1, arrival.output_tokens // shrink)
        if self._context and wanted + output > self._context:
            self.num_clipped += 1
            output = min(output, max(1, self._context // 2))
            wanted = min(wanted, self._context - output)
        if not arrival.hash_ids:
            return Turn(self._content.run(_TAIL, number, wanted), output)
        block = max(1, TRACE_BLOCK_TOKENS // shrink)
        runs = [self._content.run(_BLOCK, name, block) for name in arrival.hash_ids[: -(-wanted // block)]]
        pieces = tuple(itertools.chain.from_iterable(run.pieces for run in runs))
        return Turn(Run(pieces[: len(pieces) * wanted // (block * len(runs))]), output)  # type: ignore[arg-type]


def check_fits(options: ServeOptions, context: int) -> None:
    """Raises UsageError for prompts that the model has no room for. Those of traces are clipped instead."""
    needed = options.input_tokens + options.output_tokens
    if options.load == "multiturn":
        needed = options.shared_tokens + options.turns * needed
    if context and options.load != "trace" and needed > context:
        raise UsageError(
            f"{needed} tokens of prompt and answer are more than the model's context of {context}",
            hint="smaller --input-tokens, --output-tokens or --turns",
        )
