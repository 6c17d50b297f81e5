"""The load of `coppice bench split`, and what is measured of it, alike for both contenders.

    idle      one request at a time, nothing else at work
    steady    streams that decode throughout; their tokens per second are the throughput
    arrivals  short requests at the times of a Poisson process, while the steady streams decode; each gives one TTFT

A TTFT runs from the time at which a request was due to the time at which its first token came back to the driver.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns, sleep
from typing import Protocol

import numpy as np

from coppice.errors import CoppiceError
from coppice.ids import TOKEN_BYTES, DomainId
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Finish, Output, Request, TokenBatch

DOMAIN = DomainId("bench")
TENANT = "bench"
IDLE_PAUSE_S = 0.02
SETTLE_S = 0.3
PATIENCE_S = 60.0
_NS_PER_S = 1_000_000_000
_VOCABULARY = 250  # below the special tokens of any model


@dataclass(frozen=True, slots=True)
class Load:
    """One round."""

    step_ms: float  # of a worker that sleeps; ignored by one that computes
    streams: int
    seconds: float
    arrivals_per_s: float
    idle_requests: int
    seed: int
    prompt_tokens: int = 96
    output_tokens: int = 4
    steady_tokens: int = 1 << 14  # at most, of each steady stream


@dataclass(frozen=True, slots=True)
class Measured:
    """What a round gave. Times in ms."""

    tokens_per_s: float  # of the steady streams
    idle_ttft_ms: list[float]
    ttft_ms: list[float]
    late_ms: float  # median time by which the driver was late with an arrival


class Contender(Protocol):
    """A serving stack, as the driver sees it."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def run_until(self, due_ns: int) -> None:
        """Let it work until then (perf_counter_ns). What it tells goes to `Recorder.told`."""


@dataclass(slots=True)
class _Open:
    due_ns: int
    first_ns: int = 0


@dataclass(slots=True)
class Recorder:
    """Hears of every token. In the split stack in the planner's turns, the driver reads what is written here."""

    steady_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    _open: dict[int, _Open] = field(default_factory=dict)  # by request number
    _steady: set[int] = field(default_factory=set)
    _next: int = 1
    num_open: int = 0

    def opened(self, due_ns: int, *, is_steady: bool) -> int:
        """A request is about to be submitted: its number."""
        number, self._next = self._next, self._next + 1
        self._open[number] = _Open(due_ns)
        if is_steady:
            self._steady.add(number)
        self.num_open += 1
        return number

    def told(self, tokens: Iterable[TokenBatch], outputs: Iterable[Output]) -> None:
        now_ns = perf_counter_ns()
        for batch in tokens:
            numbers, counts = np.unique(np.frombuffer(batch.numbers, "<u4"), return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._came(number, count, now_ns)
        for output in outputs:
            number = int(output.request_id)
            self._came(number, len(output.tokens) // TOKEN_BYTES, now_ns)
            if output.finish is not None:
                self.num_open -= 1
                self._steady.discard(number)
                if output.finish is Finish.ERROR:
                    self.failures.append(str(output.error))

    def refused(self, message: str) -> None:
        self.num_open -= 1
        self.failures.append(message)

    def _came(self, number: int, count: int, now_ns: int) -> None:
        if not count:
            return
        request = self._open[number]
        if not request.first_ns:
            request.first_ns = now_ns
        if number in self._steady:
            self.steady_tokens += count

    def has_first(self, number: int) -> bool:
        return bool(self._open[number].first_ns)

    def ttft_ms(self, number: int) -> float:
        request = self._open[number]
        if not request.first_ns:
            raise CoppiceError(f"request {number} of the benchmark brought no token: {self.failures[:3]}")
        return (request.first_ns - request.due_ns) / 1e6


class Driver:
    """Runs rounds on one contender."""

    def __init__(self, contender: Contender, recorder: Recorder) -> None:
        self._contender = contender
        self._recorder = recorder

    def run(self, load: Load) -> Measured:
        """Raises CoppiceError when a request fails."""
        source = random.Random(load.seed)
        idle = [self._idle(source, load) for _ in range(load.idle_requests)]
        steady = [self._open(source, load, 0, load.steady_tokens, is_steady=True) for _ in range(load.streams)]
        self._wait(lambda: all(self._recorder.has_first(number) for number in steady))
        self._contender.run_until(perf_counter_ns() + int(SETTLE_S * _NS_PER_S))
        began_ns, began_tokens = perf_counter_ns(), self._recorder.steady_tokens
        arrived, late_ms = self._arrive(source, load, began_ns)
        tokens = self._recorder.steady_tokens - began_tokens
        lasted_s = (perf_counter_ns() - began_ns) / _NS_PER_S
        self._wait(lambda: all(self._recorder.has_first(number) for number in arrived))
        for number in steady:
            self._contender.cancel(str(number))
        self._wait(lambda: not self._recorder.num_open)
        if self._recorder.failures:
            raise CoppiceError(f"requests of the benchmark failed: {self._recorder.failures[:3]}")
        ttft = [self._recorder.ttft_ms(number) for number in arrived]
        late = sorted(late_ms)[len(late_ms) // 2] if late_ms else 0.0
        return Measured(tokens / lasted_s, idle, ttft, late)

    def _idle(self, source: random.Random, load: Load) -> float:
        self._contender.run_until(perf_counter_ns() + int(IDLE_PAUSE_S * _NS_PER_S))
        number = self._open(source, load, perf_counter_ns(), 1, is_steady=False)
        self._wait(lambda: not self._recorder.num_open)
        return self._recorder.ttft_ms(number)

    def _arrive(self, source: random.Random, load: Load, began_ns: int) -> tuple[list[int], list[float]]:
        """Numbers of the arrivals of the round, and how late each was submitted."""
        ends_ns = began_ns + int(load.seconds * _NS_PER_S)
        due_ns = began_ns
        arrived: list[int] = []
        late_ms: list[float] = []
        while True:
            due_ns += int(source.expovariate(load.arrivals_per_s) * _NS_PER_S)
            if due_ns >= ends_ns:
                self._contender.run_until(ends_ns)
                return arrived, late_ms
            self._contender.run_until(due_ns)
            late_ms.append((perf_counter_ns() - due_ns) / 1e6)
            arrived.append(self._open(source, load, due_ns, load.output_tokens, is_steady=False))

    def _open(self, source: random.Random, load: Load, due_ns: int, num_tokens: int, *, is_steady: bool) -> int:
        number = self._recorder.opened(due_ns, is_steady=is_steady)
        prompt = np.array(source.choices(range(_VOCABULARY), k=load.prompt_tokens), "<u4").tobytes()
        sampling = SamplingParams(temperature=0.0)
        self._contender.submit(Request(str(number), TENANT, DOMAIN, prompt, sampling, num_tokens, number=number))
        return number

    def _wait(self, is_done: Callable[[], bool]) -> None:
        ends_ns = perf_counter_ns() + int(PATIENCE_S * _NS_PER_S)
        while not is_done() and not self._recorder.failures:
            if perf_counter_ns() > ends_ns:
                raise CoppiceError(f"the stack under measurement did not get done within {PATIENCE_S:.0f} s")
            self._contender.run_until(perf_counter_ns() + 1_000_000)


def sleep_until(due_ns: int) -> None:
    """`due_ns` on perf_counter_ns."""
    left_ns = due_ns - perf_counter_ns()
    if left_ns > 0:
        sleep(left_ns / 1e9)
