"""A scheduler core among a fake cache service and fake workers, in virtual time.

    World.run        next event -> core -> advance -> messages into channels -> check everything -> ...

Channels keep order and add latency. Breaking a link loses what is in it (fresh), or only delays it (resumed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

import numpy as np

from coppice.ids import DomainId, LeaseId, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import FromClient, Publish, ToClient
from coppice.messages.step import SamplingParams, StepPlan
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects, Finish, Output, OutputError, Refused, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_worker import FakeWorker, reference, u32

MS = 1_000_000


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


@dataclass
class Outcome:
    """What a client saw of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    last: Output | None = None

    def expected(self) -> tuple[list[int], bool]:
        request = self.request
        prompt = u32(request.tokens)
        return reference(prompt, request.sampling.seed, request.max_new_tokens, request.stop_token_ids)


class World:
    def __init__(self, settings: SchedulerSettings, index: FakeIndex, seed: int = 0) -> None:
        self.random = Random(seed)
        self.core = SchedulerCore(settings)
        self.index = index
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.outcomes: dict[str, Outcome] = {}
        self._outcome_of: dict[int, Outcome] = {}  # by number of the request
        self.now_ns = 0
        self.step_us = 0  # that its workers say a step takes
        self.sent_ops: list[FromClient] = []
        self.plans: list[tuple[WorkerId, StepPlan]] = []
        self.epoch = SchedulerEpoch(1)
        self.index_up = False
        self._held: list[Callable[[], None]] = []  # arrivals while the link is down: late if it resumes
        self._link = 0  # incarnation of the link to the index: what an older one carries is lost
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._ids = count(1)
        self._last: dict[str, int] = {}  # per channel, arrival of its last message
        self._transit: dict[WorkerId, list[StepPlan]] = {}
        self._wakeup_ns: int | None = None
        index.still_used = self._still_used
        index.was_computed = self._was_computed
        index.fence = self._fence

    # --- time

    def after(self, delay_ms: float, event: Callable[[], None], channel: str = "") -> None:
        at = self.now_ns + int(delay_ms * MS)
        if channel:
            at = max(at, self._last.get(channel, 0))
            self._last[channel] = at
        heappush(self._events, (at, next(self._ids), event))

    def run(self, until_ms: float | None = None, max_events: int = 20_000) -> None:
        """Play events until there are none (or until a time), checking both sides after each."""
        for _ in range(max_events):
            if not self._events or (until_ms is not None and self._events[0][0] > until_ms * MS):
                if until_ms is not None:
                    self.now_ns = max(self.now_ns, int(until_ms * MS))
                return
            at, _, event = heappop(self._events)
            self.now_ns = max(self.now_ns, at)
            event()
        raise AssertionError("the world does not come to rest")

    def poke(self) -> Effects:
        """Let the core act on what it was told."""
        effects = self.core.advance(self.now_ns)
        for message in effects.to_index:
            self.sent_ops.append(message)
            self._to_index(message)
        for worker_id, plan in effects.plans:
            self.plans.append((worker_id, plan))
            self._to_worker(worker_id, plan)
        for batch in effects.tokens:
            for number, token in zip(u32(batch.numbers), u32(batch.tokens), strict=True):
                self._take_token(self._outcome_of[number], token)
        for output in effects.outputs:
            self._take_output(output)
        self.core.check()
        self.index.check()
        wakeup = self.core.next_wakeup_ns()
        if wakeup is not None and wakeup != self._wakeup_ns:
            assert wakeup > self.now_ns, "a wakeup that is due already"
            self._wakeup_ns = wakeup
            heappush(self._events, (wakeup, next(self._ids), self._wake))
        return effects

    def _wake(self) -> None:
        self._wakeup_ns = None
        self.poke()

    def _delay(self, most_ms: float) -> float:
        return self.random.random() * most_ms

    # --- requests

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_new: int,
        *,
        domain: str = "d",
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
        **fields: Any,
    ) -> Refused | None:
        request = Request(
            request_id=request_id,
            tenant=domain,
            domain=DomainId(domain),
            tokens=pack(prompt),
            sampling=SamplingParams(seed=seed),
            max_new_tokens=max_new,
            stop_token_ids=stops,
            number=next(self._ids),
            **fields,
        )
        refused = self.core.submit(request, self.now_ns)
        if refused is None:
            self.outcomes[request_id] = self._outcome_of[request.number] = Outcome(request)
        self.poke()
        return refused

    def end(self, request_id: str, error: OutputError) -> None:
        """Without a look at what follows: the next event may end another one."""
        outcome = self.outcomes[request_id]
        assert self.core.end(request_id, error, self.now_ns) == (outcome.last is None or outcome.last.finish is None)

    def cancel(self, request_id: str) -> None:
        self.core.cancel(request_id, self.now_ns)
        self.poke()

    def _take_token(self, outcome: Outcome, token: int) -> None:
        assert outcome.last is None or outcome.last.finish is None, "a token after the last output (I16)"
        outcome.tokens.append(token)
        expected, _ = outcome.expected()
        assert outcome.tokens == expected[: len(outcome.tokens)], "tokens differ from the reference"

    def _take_output(self, output: Output) -> None:
        outcome = self.outcomes[output.request_id]
        for token in u32(output.tokens):
            self._take_token(outcome, token)
        assert outcome.last is None or outcome.last.finish is None, "an output after the last one (I16)"
        outcome.last = output
        assert output.num_output_tokens - bool(output.stop_token) == len(outcome.tokens)

    def finish_of(self, request_id: str) -> Finish | None:
        last = self.outcomes[request_id].last
        return last.finish if last is not None else None

    # --- the cache service

    def attach_index(self, *, fresh: bool = True) -> None:
        """Handshake. What was on its way is lost (fresh), or was only late."""
        self.index_up = True
        held, self._held = self._held, []
        self._link += fresh
        self.core.index_attached(self.epoch, self.index.epoch, fresh, self.now_ns)
        if fresh:
            self.tell(self.index.workers())
        self.poke()
        for arrive in held:
            arrive()

    def lose_index(self) -> None:
        self.index_up = False
        self.core.index_lost(self.now_ns)
        self.poke()

    def new_session(self) -> None:
        """The session expired there: its leases are fenced, and the next handshake mints another epoch."""
        self.epoch = SchedulerEpoch(self.epoch + 1)
        for lease_id in list(self.index.leases):
            self.index.drop(lease_id)
        for worker in self.workers.values():
            for resident in worker.residents.values():
                worker.fence(resident.lease_id)
            transit = self._transit[worker.worker_id]
            worker.fenced |= {start.lease_id for plan in transit for start in plan.attach}

    def _to_index(self, message: FromClient) -> None:
        link = self._link

        def arrive() -> None:
            if link == self._link and not self.index_up:
                self._held.append(arrive)
            elif link == self._link:
                answer = self.index.take(message)
                if answer is not None:
                    self.tell(answer)
                said, self.index.outbox = self.index.outbox, []
                for unasked in said:
                    self.tell(unasked)

        self.after(self._delay(0.5), arrive, "to_index")

    def tell(self, message: ToClient) -> None:
        """Send to the scheduler; one of an older cache epoch arrives too, however late: it says so itself."""
        link = self._link

        def arrive() -> None:
            stale = getattr(message, "cache_epoch", self.index.epoch) != self.index.epoch
            if link == self._link and not self.index_up:
                self._held.append(arrive)
            elif link == self._link or stale:
                self.core.index_message(message, self.now_ns)
                self.poke()

        self.after(self._delay(0.5), arrive, "from_index")

    def _still_used(self, lease_id: LeaseId) -> bool:
        starts = [start for plans in self._transit.values() for plan in plans for start in plan.attach]
        fenced = {fenced for worker in self.workers.values() for fenced in worker.fenced}
        if lease_id not in fenced and any(start.lease_id == lease_id for start in starts):
            return True
        return self._is_copied(lease_id) or any(worker.uses(lease_id) for worker in self.workers.values())

    def _is_copied(self, lease_id: LeaseId) -> bool:
        """A plan on its way copies from its sequence; from one that is refused, such as a fenced one, it will not."""
        for worker_id, plans in self._transit.items():
            sources = {start.copy_from for plan in plans for start in plan.attach}
            residents = self.workers[worker_id].residents
            found = [residents[source] for source in sources & residents.keys()]
            if any(source.lease_id == lease_id and source.refusal is None for source in found):
                return True
        return False

    def _was_computed(self, op: Publish, block_size: int) -> bool:
        first = op.first_block * block_size
        end = first + len(op.tokens) // 4
        residents = [w.by_lease[op.lease_id] for w in self.workers.values() if op.lease_id in w.by_lease]
        return any(end <= r.computed and r.tokens[first:end] == u32(op.tokens) for r in residents)

    def _fence(self, lease_id: LeaseId) -> None:
        for worker_id, worker in self.workers.items():
            worker.fence(lease_id)
            for plan in self._transit[worker_id]:
                worker.fenced |= {start.lease_id for start in plan.attach if start.lease_id == lease_id}

    # --- workers

    def add_worker(self, name: str, num_blocks: int, epoch: int = 1, *, attach: bool = True) -> None:
        worker_id = WorkerId(name)
        worker = FakeWorker(worker_id, WorkerEpoch(epoch), num_blocks, self.index.block_size, step_us=self.step_us)
        self.workers[worker_id] = worker
        self._transit[worker_id] = []
        self.index.register(worker_id, WorkerEpoch(epoch), num_blocks)
        self.tell(self.index.workers())
        if attach:
            self.attach_worker(worker_id, fresh=True)

    def attach_worker(self, worker_id: WorkerId, *, fresh: bool) -> None:
        self.core.worker_attached(worker_id, self.workers[worker_id].epoch, fresh, self.now_ns)
        self.poke()

    def lose_worker(self, worker_id: WorkerId) -> None:
        self.core.worker_lost(worker_id, self.now_ns)
        self.poke()

    def miss_worker(self, worker_id: WorkerId) -> None:
        """Nobody listens where it was, as it seems."""
        self.core.worker_gone(worker_id, self.now_ns)
        self.poke()

    def restart_worker(self, worker_id: WorkerId) -> None:
        """It comes back empty, under another epoch; the connection and the list of workers race."""
        old = self.workers[worker_id]
        self.lose_worker(worker_id)
        self.add_worker(worker_id, old.num_blocks, old.epoch + 1, attach=False)
        self.after(self._delay(3), lambda: self.attach_worker(worker_id, fresh=True))

    def _to_worker(self, worker_id: WorkerId, plan: StepPlan) -> None:
        worker = self.workers[worker_id]
        self._transit[worker_id].append(plan)

        def compute() -> None:
            if self.workers[worker_id] is not worker:
                return
            result = worker.apply(plan)
            self._transit[worker_id].remove(plan)
            self.after(self._delay(0.3), lambda: answer(), f"from_{worker_id}")

            def answer() -> None:
                if self.workers[worker_id] is worker:
                    self.core.worker_result(worker_id, result, self.now_ns)
                    self.poke()

        self.after(0.5 + self._delay(1.5), compute, f"to_{worker_id}")
