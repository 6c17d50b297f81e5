"""A scheduler core, a quick cache service and a worker whose steps take stated times, in virtual time.

    step = step_us + prefill_token_us * prefill tokens + decode_row_us * decode rows

The worker keeps its own books of what it computed for whom (`served`), so what is measured owes nothing to the
counters that the scheduler decides by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from coppice.ids import DomainId, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.step import SamplingParams, StepPlan, StepResult
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Output, Refused, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.fair_cache import FairCache

MS = 1_000_000
W = WorkerId("w")


@dataclass(frozen=True)
class Costs:
    step_us: int = 5000
    prefill_token_us: int = 20
    decode_row_us: int = 50
    index_us: int = 300  # one way to the cache service
    plan_us: int = 100  # one way to the worker


@dataclass
class Visit:
    """What one client saw of one request."""

    request: Request
    sent_ns: int
    first_token_ns: int = 0
    end_ns: int = 0
    last: Output | None = None
    num_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        assert self.first_token_ns, f"{self.request.request_id} got no token"
        return (self.first_token_ns - self.sent_ns) / MS


@dataclass
class _Resident:
    visit: Visit
    known: int
    computed: int
    num_prompt: int


@dataclass(frozen=True)
class Served:
    """Work that was done for a tenant in one step."""

    at_ns: int
    tenant: str
    prefill_tokens: int
    output_tokens: int


@dataclass
class FairWorld:
    settings: SchedulerSettings
    costs: Costs = Costs()
    num_blocks: int = 4096
    block_size: int = 16
    max_sequences: int = 0
    now_ns: int = 0
    visits: dict[str, Visit] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    longest_step_ns: int = 0
    on_end: Callable[[Visit], object] = lambda visit: None
    check: bool = False  # the core's own conservation laws, after each event

    def __post_init__(self) -> None:
        self.core = SchedulerCore(self.settings)
        self.cache = FairCache(W, self.num_blocks, self.block_size, self.max_sequences)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._ids = count(1)
        self._by_number: dict[int, Visit] = {}
        self._residents: dict[int, _Resident] = {}
        self._plans: deque[StepPlan] = deque()
        self._is_busy = False
        self._last_rows: list[int] = []
        self._wakeup_ns: int | None = None
        self.core.index_attached(SchedulerEpoch(1), self.cache.workers().cache_epoch, True, 0)
        self.core.index_message(self.cache.workers(), 0)
        self.core.worker_attached(W, WorkerEpoch(1), True, 0)

    # --- time

    def at(self, at_ms: float, event: Callable[[], None]) -> None:
        heappush(self._events, (max(self.now_ns, int(at_ms * MS)), next(self._ids), event))

    def _after(self, delay_us: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now_ns + int(delay_us * 1000), next(self._ids), event))

    def run(self, until_ms: float = float("inf")) -> None:
        """Play events until there are none, or until a time."""
        while self._events and self._events[0][0] <= until_ms * MS:
            self.now_ns, _, event = heappop(self._events)
            event()
            self._advance()

    def _advance(self) -> None:
        effects = self.core.advance(self.now_ns)
        for message in effects.to_index:
            answer = self.cache.take(message)
            if answer is not None:
                self._after(2 * self.costs.index_us, lambda a=answer: self.core.index_message(a, self.now_ns))  # type: ignore[misc]
        for _, plan in effects.plans:
            self._after(self.costs.plan_us, lambda p=plan: self._take_plan(p))  # type: ignore[misc]
        for batch in effects.tokens:
            for number in np.frombuffer(batch.numbers, dtype="<u4").tolist():
                self._tokens_came(self._by_number[number], 1)
        for output in effects.outputs:
            self._take_output(output)
        if self.check:
            self.core.check()
        wakeup = self.core.next_wakeup_ns()
        if wakeup is not None and wakeup != self._wakeup_ns:
            self._wakeup_ns = wakeup
            heappush(self._events, (wakeup, next(self._ids), lambda: None))

    # --- clients

    def submit(
        self, tenant: str, num_prompt: int, num_output: int, *, prompt: bytes = b"", **fields: object
    ) -> Refused | None:
        """`prompt`: shared start of the prompt; the rest is the request's own."""
        number = next(self._ids)
        own = np.arange(number * 100_000, number * 100_000 + num_prompt, dtype="<u4").tobytes()
        request = Request(
            request_id=f"{tenant}/{number}",
            tenant=tenant,
            domain=DomainId(tenant),
            tokens=(prompt + own)[: num_prompt * 4],
            sampling=SamplingParams(),
            max_new_tokens=num_output,
            traceparent=f"{tenant}/{number}",
            number=number,
            **fields,  # type: ignore[arg-type]
        )
        refused = self.core.submit(request, self.now_ns)
        if refused is None:
            self.visits[request.request_id] = self._by_number[number] = Visit(request, self.now_ns)
            self._after(0, lambda: None)  # the core is to act on it
        return refused

    def _tokens_came(self, visit: Visit, num_tokens: int) -> None:
        visit.num_tokens += num_tokens
        visit.first_token_ns = visit.first_token_ns or self.now_ns

    def _take_output(self, output: Output) -> None:
        visit = self.visits[output.request_id]
        if output.tokens:
            self._tokens_came(visit, len(output.tokens) // 4)
        if output.finish is not None:
            visit.end_ns, visit.last = self.now_ns, output
            self.on_end(visit)

    # --- the worker

    def _take_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if not self._is_busy:
            self._start_step()

    def _start_step(self) -> None:
        plan = self._plans.popleft()
        for sequence_id in np.frombuffer(plan.detach, dtype="<u4").tolist():
            del self._residents[sequence_id]
        for start in plan.attach:
            known = len(start.tokens) // 4
            visit = self.visits[start.traceparent]
            self._residents[start.sequence_id] = _Resident(
                visit, known, start.num_computed_tokens, start.num_prompt_tokens
            )
        rows = np.frombuffer(plan.rows, dtype="<u4").tolist()
        counts = np.frombuffer(plan.row_tokens, dtype="<u4").tolist()
        if plan.repeat_rows:
            rows, counts = self._last_rows, [1] * len(self._last_rows)
        self._last_rows = rows
        prefill = sum(n for n in counts if n > 1)
        decodes = sum(n == 1 for n in counts)
        costs = self.costs
        step_us = costs.step_us + costs.prefill_token_us * prefill + costs.decode_row_us * decodes
        duration_us = step_us * plan.num_decode_steps if rows else 100
        self.longest_step_ns = max(self.longest_step_ns, duration_us * 1000)
        self._is_busy = True
        self._after(duration_us, lambda: self._end_step(plan, rows, counts, duration_us))

    def _end_step(self, plan: StepPlan, rows: list[int], counts: list[int], duration_us: int) -> None:
        sampled = []
        for sequence_id, num_tokens in zip(rows, counts, strict=True):
            resident = self._residents[sequence_id]
            prefill = min(num_tokens, max(0, resident.known - resident.computed))
            resident.computed += num_tokens * plan.num_decode_steps
            samples = resident.computed >= resident.known
            outputs = plan.num_decode_steps if samples else 0
            resident.known += outputs
            if samples:
                sampled.append(sequence_id)
            prefill = prefill if prefill > 1 else 0
            self.served.append(Served(self.now_ns, resident.visit.request.tenant, prefill, outputs))
        result = StepResult(
            step=plan.step,
            sampled_ids=np.array(sampled, dtype="<u4").tobytes(),
            sampled_tokens=np.full((plan.num_decode_steps, len(sampled)), 7, dtype="<u4").tobytes(),
            num_tokens=sum(counts),
            duration_us=duration_us,
        )
        self._after(self.costs.plan_us, lambda: self.core.worker_result(W, result, self.now_ns))
        self._is_busy = False
        if self._plans:
            self._start_step()

    # --- what it came to

    def service(self, from_ms: float, to_ms: float) -> dict[str, int]:
        """Tokens computed and sampled for each tenant in [from_ms, to_ms)."""
        found: dict[str, int] = {}
        for served in self.served:
            if from_ms * MS <= served.at_ns < to_ms * MS:
                tokens = served.prefill_tokens + served.output_tokens
                found[served.tenant] = found.get(served.tenant, 0) + tokens
        return found

    def ttfts_ms(self, tenant: str) -> list[float]:
        return [visit.ttft_ms for visit in self.visits.values() if visit.request.tenant == tenant]
