"""A cell in virtual time: the real cores of its planners and of the cache service, and workers that compute nothing.

    requests --match, choose--> a planner's core --ops--> index core --answers--> planners' cores
                                     |  ^
                              plans  v  |  results, a step later
                                  its workers, each with as many sequences as it may have

The cache service's core says which planner owns which worker. Requests go where front doors send them: to the planner
that `placement.choose` names, by what is cached on its workers and by what waits there, which planners tell at each
tick. Each request that ends is followed by another of its tenant, so that all workers are full. What happens within
`TURN_NS` is one turn of a planner, as it is in its process when much happens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import numpy as np

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import FromClient, MatchQueries, MatchQuery, ToClient
from coppice.messages.registration import Owner, Register
from coppice.messages.step import SamplingParams, StepPlan, StepResult
from coppice_bench.fleet.planner import Planner
from coppice_bench.plan.sampled_worker import SampledWorker
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.policy.placement import choose
from coppice_scheduler.core.state.request import Effects, Request

BLOCK = 16  # tokens
NUM_BLOCKS = 8_192  # of each worker
ROWS = 64  # sequences of each worker
NUM_TENANTS = 32
SHARED_TOKENS = 256  # that all prompts of a tenant begin with
OWN_TOKENS = (32, 256)
OUTPUT_TOKENS = (32, 256)
PREFILL_TOKENS = 2_048  # of a step
STOP = 0
VOCABULARY = 32_000
STEP_NS = 20_000_000
TURN_NS = 1_000_000
TICK_NS = 100_000_000
EPOCH = CacheEpoch(1)
NAMESPACE = Namespace(b"fleet")


@dataclass(slots=True)
class Spent:
    """Processor time in ns, and what was done in it. That of planners is theirs."""

    cache_ns: int = 0  # without the next one
    match_ns: int = 0  # of the cache service, to say what of a request is cached where
    steps: int = 0
    ended: int = 0
    tokens: int = 0


class FleetWorld:
    """`clock` is read around what is measured; it tells processor time in ns."""

    def __init__(self, num_workers: int, num_planners: int, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._size = num_workers * ROWS
        self._random = Random(7)
        self._ids = np.random.default_rng(7)
        self._now_ns = 0
        self._ticked_ns = 0
        self._num_asked = 0
        self._tenants: dict[str, int] = {}  # of those at work
        self._to_ask = deque(number % NUM_TENANTS for number in range(self._size))  # tenants, each for one request
        self.spent = Spent()
        self._workers = {
            WorkerId(f"worker-{number}"): SampledWorker(Random(number), VOCABULARY, STOP, (1, OUTPUT_TOKENS[1]))
            for number in range(num_workers)
        }
        self._plans: dict[WorkerId, deque[StepPlan]] = {name: deque() for name in self._workers}
        self._ends: list[tuple[int, WorkerId]] = []  # of the step that a worker is at
        self._shared = [self._ids.integers(1, VOCABULARY, SHARED_TOKENS, dtype=np.uint32) for _ in range(NUM_TENANTS)]
        index = CoreSettings(seal_key=bytes(32), default_domain=DomainConfig(DomainId("any")))
        self._index = IndexCore(index, EPOCH, 0)
        rows = -(-num_workers // num_planners) * ROWS
        epochs = [self._index.attach_client(SchedulerEpoch(0), 0) for _ in range(num_planners)]
        self.planners = [Planner(epoch, rows, self._size, PREFILL_TOKENS, clock) for epoch in epochs]
        self._by_epoch = {planner.epoch: planner for planner in self.planners}
        self._owner: dict[WorkerId, Planner] = {}
        self._register()

    def _register(self) -> None:
        for planner in self.planners:
            planner.attached(EPOCH)
        for name in self._workers:
            registration = Register(
                worker_id=name,
                worker_epoch=WorkerEpoch(0),
                address=f"{name}:1",
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                namespace=NAMESPACE,
                model="m",
                highest_cache_epoch=CacheEpoch(0),
                generations=bytes(8 * NUM_BLOCKS),
                seals=bytes(16 * NUM_BLOCKS),
                scheduler_epochs=(),
                max_sequences=ROWS,
                max_step_tokens=ROWS + PREFILL_TOKENS,
                knows_owners=True,
            )
            self._index.receive_worker(name, registration, 0)
        effects = self._index.take_effects()
        self._hear(effects)
        for effect in effects:
            if isinstance(effect, ToWorkerEffect) and isinstance(owner := effect.message, Owner):
                planner = self._owner[effect.worker_id] = self._by_epoch[owner.owner]
                planner.worker_attached(effect.worker_id, owner.worker_epoch)

    def warm_up(self) -> None:
        """Until as many have ended as run at a time: ends and block boundaries are spread over the steps then."""
        while self.spent.ended < self._size:
            self.turn()
        self.spent = Spent()
        for planner in self.planners:
            planner.begin()

    @property
    def cached_share(self) -> float:
        """Of the tokens of prompts, those that were found cached."""
        cached, computed = (sum(counts) for counts in zip(*(p.prompt_tokens for p in self.planners), strict=True))
        return float(cached / max(1, cached + computed))

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._now_ns / 1e9

    def turn(self) -> None:
        """The next turn of the planners, with all results that have come by then."""
        for _ in range(min(len(self._to_ask), len(self._workers))):  # who comes at once finds nothing cached
            self._submit(self._to_ask.popleft())
        if self._ends:
            self._now_ns = max(self._now_ns, self._ends[0][0])
        results: defaultdict[SchedulerEpoch, list[tuple[WorkerId, StepResult]]] = defaultdict(list)
        while self._ends and self._ends[0][0] <= self._now_ns + TURN_NS:
            end_ns, name = heappop(self._ends)
            results[self._owner[name].epoch].append((name, self._workers[name].result(self._plans[name].popleft())))
            self._start(name, end_ns)
        for epoch, found in results.items():
            self._by_epoch[epoch].take(found, self._now_ns)
            self.spent.steps += len(found)
        self._decide()
        if self._now_ns - self._ticked_ns >= TICK_NS:
            self._tick()

    # ---- what the cores are told

    def _submit(self, tenant: int) -> None:
        number = self._num_asked = self._num_asked + 1
        own = self._ids.integers(1, VOCABULARY, self._random.randrange(*OWN_TOKENS), dtype=np.uint32)
        request = Request(
            request_id=f"r{number}",
            tenant=f"t{tenant}",
            domain=DomainId(f"t{tenant}"),
            tokens=np.concatenate([self._shared[tenant], own]).astype("<u4").tobytes(),
            sampling=SamplingParams(),
            max_new_tokens=self._random.randrange(*OUTPUT_TOKENS),
            stop_token_ids=frozenset({STOP}),
            arrived_ns=self._now_ns,
            number=number,
        )
        num_tokens = SHARED_TOKENS + len(own)
        matched = self._matched(request)
        index = choose([planner.load for planner in self.planners], matched, num_tokens)
        self.planners[index].submit(request, num_tokens - matched[index], self._now_ns)
        self._tenants[f"r{number}"] = tenant

    def _matched(self, request: Request) -> list[int]:
        """Tokens of its prompt that are cached on the best worker of each planner. One planner is not asked about."""
        if len(self.planners) == 1:
            return [0]
        query = MatchQueries((MatchQuery(request.domain, NAMESPACE, request.tokens),))
        began = self._clock()
        (hint,) = self._index.match_all(query).hints
        self.spent.match_ns += self._clock() - began
        found = dict(zip(hint.worker_ids, hint.num_cached_tokens, strict=True))
        return [max((found.get(name, 0) for name in planner.owned), default=0) for planner in self.planners]

    def _decide(self) -> None:
        """Until no core has anything to say to another."""
        while due := [planner for planner in self.planners if planner.is_due]:
            for planner in due:
                effects = planner.advance(self._now_ns)
                self._carry_out(planner, effects)
                self._ask(planner, effects.to_index)

    def _carry_out(self, planner: Planner, effects: Effects) -> None:
        for name, plan in effects.plans:
            self._plans[name].append(plan)
            if len(self._plans[name]) == 1:
                self._start(name, self._now_ns)
        self.spent.tokens += sum(len(batch.numbers) // 4 for batch in effects.tokens)
        for output in effects.outputs:
            assert output.error is None, output.error
            if output.finish is not None:
                self.spent.ended += 1
                planner.ended += 1
                self._to_ask.append(self._tenants.pop(output.request_id))

    def _ask(self, planner: Planner, messages: tuple[FromClient, ...]) -> None:
        if not messages:
            return
        began = self._clock()
        for message in messages:
            self._index.receive_client(planner.epoch, message, self._now_ns)
        answers = self._index.take_effects()
        self.spent.cache_ns += self._clock() - began
        self._hear(answers)

    def _hear(self, effects: Sequence[Effect]) -> None:
        told: defaultdict[SchedulerEpoch, list[ToClient]] = defaultdict(list)
        for effect in effects:
            if isinstance(effect, ToClientEffect):
                told[effect.epoch].append(effect.message)
        for epoch, messages in told.items():
            self._by_epoch[epoch].hear(messages, self._now_ns)

    def _tick(self) -> None:
        self._ticked_ns = self._now_ns
        began = self._clock()
        for planner in self.planners:
            self._index.heard_client(planner.epoch, self._now_ns)
        for name in self._workers:
            self._index.heard_worker(name, self._now_ns)
        self._index.tick(self._now_ns)
        effects = self._index.take_effects()
        self.spent.cache_ns += self._clock() - began
        self._hear(effects)
        for planner in self.planners:
            planner.tell_load()

    def _start(self, name: WorkerId, now_ns: int) -> None:
        """The worker's next step, if it has been sent one."""
        if self._plans[name]:
            heappush(self._ends, (now_ns + STEP_NS, name))
