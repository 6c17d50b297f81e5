"""One run of a load on a real core in virtual time: what is reserved, what of it is in use, what is refused.

    arrive --Acquire--> fill the prompt --Publish--> decode, Extend ahead of need --Publish, Release--> gone
               |                            |                       |
               |                            `-- some fork: a second lease on the same prompt
               `-- no capacity: wait for somebody to end            `-- some are cancelled on the way

A worker that fills `PREFILL_TOKENS_PER_MS` and decodes each sequence at one token per `TOKEN_MS`. A lease reserves one
token beyond the prompt and grows as the scheduler's do: one block ahead of need. When an extension is refused, the
youngest sequence gives its blocks back and waits again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median
from time import perf_counter_ns
from typing import Any

from coppice.errors import CoppiceError
from coppice.ids import TOKEN_BYTES, LeaseId
from coppice.messages.index import Extend, Extended, Grant, NoCapacity
from coppice_bench.arrivals import Arrival
from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.rpc.client import WORKER

PREFILL_TOKENS_PER_MS = 20
TOKEN_MS = 20
SAMPLE_MS = 1_000
CANCELLED_SHARE = 0.05
FORKED_SHARE = 0.05
_MS = 1_000_000
_OUTPUT_TOKENS_FROM = 1 << 31  # ids that no prompt has


@dataclass(eq=False, slots=True)
class _Sequence:
    prompt: bytes
    input_tokens: int
    output_tokens: int  # until it ends or is cancelled
    forks: bool
    number: int
    done_tokens: int = 0  # decoded before it was preempted
    lease_id: LeaseId = LeaseId(b"")
    cached_tokens: int = 0
    granted_ms: int = 0
    filled_ms: int = 0
    reserved: int = 0
    waits_since_ms: int = 0

    @property
    def start_tokens(self) -> int:
        return self.input_tokens + self.done_tokens

    @property
    def most_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def num_tokens(self, now_ms: int) -> int:
        """Known by now: the prompt and what was decoded."""
        decoded = max(0, (now_ms - self.filled_ms) // TOKEN_MS)
        return min(self.most_tokens, self.start_tokens + decoded)

    def num_computed(self, now_ms: int) -> int:
        """Have KV by now."""
        if now_ms >= self.filled_ms:
            return self.num_tokens(now_ms)
        return min(self.start_tokens, self.cached_tokens + (now_ms - self.granted_ms) * PREFILL_TOKENS_PER_MS)

    def tokens(self, count: int) -> bytes:
        """The first `count`, packed."""
        first = _OUTPUT_TOKENS_FROM + self.number * 4_096
        decoded = b"".join((first + n).to_bytes(TOKEN_BYTES, "little") for n in range(count - self.input_tokens))
        return self.prompt[: count * TOKEN_BYTES] + decoded


@dataclass(slots=True)
class _Sums:
    """Over the samples."""

    tokens: int = 0
    computed: int = 0
    slots: int = 0
    sequences: int = 0
    shares: list[float] = field(default_factory=list)
    peak_blocks: int = 0
    peak_sequences: int = 0


class ChurnWorld:
    """A core, the sequences that live in it, and those that wait."""

    def __init__(self, num_blocks: int, block_size: int, seed: int) -> None:
        self._driver = CoreDriver(num_blocks, block_size)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._random = random.Random(seed)
        self._events: list[tuple[int, int, str, _Sequence | None]] = []
        self._order = 0
        self._live: dict[int, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._counts: Counter[str] = Counter()
        self._waits_ms: list[int] = []
        self._match_ns: list[int] = []
        self._acquire_ns: list[int] = []
        self._sums = _Sums()
        self._numbers = 0

    def run(self, arrivals: list[Arrival]) -> dict[str, Any]:
        """Until everything has ended."""
        for arrival in arrivals:
            self._at(arrival.at_ms, "arrive", self._sequence_of(arrival))
        self._at(arrivals[0].at_ms, "sample", None)
        handlers = {"arrive": self._arrive, "filled": self._filled, "grow": self._grow, "end": self._end}
        while self._events:
            now_ms, _, kind, sequence = heappop(self._events)
            self._driver.now_ns = max(self._driver.now_ns, now_ms * _MS)
            if sequence is None:
                self._sample(now_ms)
            elif kind == "arrive" or self._live.get(sequence.number) is sequence:
                handlers[kind](sequence, now_ms)
        return self._report()

    def _at(self, ms: int, kind: str, sequence: _Sequence | None) -> None:
        self._order += 1
        heappush(self._events, (ms, self._order, kind, sequence))

    def _sequence_of(self, arrival: Arrival) -> _Sequence:
        output = arrival.output_tokens
        if self._random.random() < CANCELLED_SHARE:
            output = self._random.randint(1, output)
            self._counts["cancelled"] += 1
        self._numbers += 1
        forks = self._random.random() < FORKED_SHARE
        return _Sequence(arrival.prompt(), arrival.input_tokens, output, forks, self._numbers)

    def _arrive(self, sequence: _Sequence, now_ms: int) -> None:
        sequence.waits_since_ms = now_ms
        if self._blocks_for(sequence.most_tokens) > self._num_blocks:
            self._counts["never_fit"] += 1
            return
        self._waiting.append(sequence)
        self._admit(now_ms)

    def _admit(self, now_ms: int) -> None:
        """First come, first served, until one is refused."""
        while self._waiting and self._start(self._waiting[0], now_ms):
            self._waiting.popleft()

    def _start(self, sequence: _Sequence, now_ms: int) -> bool:
        tokens = sequence.tokens(sequence.start_tokens)
        began = perf_counter_ns()
        self._driver.match(tokens)
        self._match_ns.append(perf_counter_ns() - began)
        op = self._driver.acquire_op(tokens, sequence.start_tokens + 1)
        began = perf_counter_ns()
        answer = self._driver.do(op)
        self._acquire_ns.append(perf_counter_ns() - began)
        self._counts["acquires"] += 1
        if isinstance(answer, NoCapacity):
            self._counts["refused"] += 1
            return False
        if not isinstance(answer, Grant):
            raise CoppiceError(f"an acquire was answered with {answer}")
        self._waits_ms.append(now_ms - sequence.waits_since_ms)
        sequence.lease_id, sequence.cached_tokens = op.lease_id, answer.num_cached_tokens
        sequence.granted_ms = now_ms
        sequence.filled_ms = now_ms + 1 + (sequence.start_tokens - sequence.cached_tokens) // PREFILL_TOKENS_PER_MS
        sequence.reserved = sequence.start_tokens + 1
        self._counts["prompt_tokens"] += sequence.start_tokens
        self._counts["cached_tokens"] += sequence.cached_tokens
        self._live[sequence.number] = sequence
        self._at(sequence.filled_ms, "filled", sequence)
        return True

    def _filled(self, sequence: _Sequence, now_ms: int) -> None:
        """The prompt is computed: findable from now on."""
        self._publish(sequence, sequence.start_tokens)
        left = sequence.most_tokens - sequence.start_tokens
        self._at(now_ms + left * TOKEN_MS, "end", sequence)
        self._grow(sequence, now_ms)
        if sequence.forks:
            self._numbers += 1
            fork = _Sequence(sequence.prompt, sequence.input_tokens, sequence.output_tokens, False, self._numbers)
            self._counts["forked"] += 1
            sequence.forks = False
            self._arrive(fork, now_ms)

    def _grow(self, sequence: _Sequence, now_ms: int) -> None:
        """Own a block beyond the next token's."""
        tokens = sequence.num_tokens(now_ms)
        wanted = min(sequence.most_tokens, tokens + 1 + self._block_size)
        if self._blocks_for(wanted) > self._blocks_for(sequence.reserved) and not self._extend(
            sequence, wanted, now_ms
        ):
            return
        until_last_block = self._blocks_for(sequence.reserved) * self._block_size - self._block_size - tokens
        if sequence.reserved < sequence.most_tokens:
            self._at(now_ms + max(1, until_last_block) * TOKEN_MS, "grow", sequence)

    def _extend(self, sequence: _Sequence, wanted: int, now_ms: int) -> bool:
        """False when the sequence itself had to go."""
        while True:
            self._counts["extends"] += 1
            answer = self._driver.do(Extend(sequence.lease_id, wanted))
            if isinstance(answer, Extended):
                sequence.reserved = wanted
                return True
            self._counts["extends_refused"] += 1
            youngest = max(self._live.values(), key=lambda live: (live.granted_ms, live.number))
            self._preempt(youngest, now_ms)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: _Sequence, now_ms: int) -> None:
        self._counts["preempted"] += 1
        sequence.done_tokens = sequence.num_tokens(now_ms) - sequence.input_tokens
        self._driver.release(sequence.lease_id)
        del self._live[sequence.number]
        sequence.waits_since_ms = now_ms
        self._waiting.appendleft(sequence)

    def _end(self, sequence: _Sequence, now_ms: int) -> None:
        self._publish(sequence, sequence.most_tokens)
        self._driver.release(sequence.lease_id)
        del self._live[sequence.number]
        self._counts["ended"] += 1
        self._admit(now_ms)

    def _publish(self, sequence: _Sequence, count: int) -> None:
        if count >= self._block_size:
            self._driver.publish(sequence.lease_id, sequence.tokens(min(count, sequence.reserved)))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _sample(self, now_ms: int) -> None:
        driver, sums = self._driver, self._sums
        driver.core.heard_worker(WORKER, driver.now_ns)
        driver.core.heard_client(driver.session, driver.now_ns)
        driver.core.tick(driver.now_ns)
        driver.core.take_effects()
        stats = driver.core.stats()
        pinned = sum(domain.pinned_blocks for worker in stats.workers for domain in worker.domains)
        sums.peak_blocks = max(sums.peak_blocks, stats.leased_blocks + pinned)
        sums.peak_sequences = max(sums.peak_sequences, len(self._live))
        for sequence in self._live.values():
            tokens = sequence.num_tokens(now_ms)
            slots = self._blocks_for(sequence.reserved) * self._block_size
            sums.tokens += tokens
            sums.computed += sequence.num_computed(now_ms)
            sums.slots += slots
            sums.sequences += 1
            sums.shares.append(tokens / slots)
        if self._events:
            self._at(now_ms + SAMPLE_MS, "sample", None)
        elif self._live or self._waiting:
            raise CoppiceError(f"{len(self._live)} sequences live and {len(self._waiting)} wait, and nothing happens")

    def _report(self) -> dict[str, Any]:
        sums, counts = self._sums, self._counts
        self._driver.core.check()
        evicted = self._driver.core.stats().evicted_blocks
        grants = max(1, counts["acquires"] - counts["refused"])
        samples = max(1, sums.sequences)
        return {
            "slot_use": sums.tokens / max(1, sums.slots),
            "slot_use_mean_of_sequences": sum(sums.shares) / samples,
            "computed_use": sums.computed / max(1, sums.slots),
            "slack": (sums.slots - sums.tokens) / samples,
            "peak_blocks": sums.peak_blocks,
            "peak_sequences": sums.peak_sequences,
            "num_blocks": self._num_blocks,
            "match_us": median(self._match_ns) / 1_000,
            "acquire_us": median(self._acquire_ns) / 1_000,
            "hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
            "evictions_per_grant": evicted / grants,
            "refused_share": counts["refused"] / max(1, counts["acquires"]),
            "wait_ms": median(self._waits_ms) if self._waits_ms else 0,
            **{name: counts[name] for name in ("ended", "cancelled", "forked", "preempted", "extends_refused")},
            "never_fit": counts["never_fit"],
        }
