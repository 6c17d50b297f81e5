"""A cell in virtual time: the real cores of the scheduler and of the cache service, and workers that compute nothing.

    requests --> scheduler core --ops--> index core --answers--> scheduler core
                     |  ^
              plans  v  |  results, a step later
                 workers, each with as many sequences as it may have

Each request that ends is followed by another of its tenant, so that all workers are full. What happens within `TURN_NS`
is one turn of the scheduler, as it is in its process when much happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import numpy as np

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import FromClient
from coppice.messages.registration import Register, Registered
from coppice.messages.step import SamplingParams, StepPlan
from coppice_bench.plan.sampled_worker import SampledWorker
from coppice_bench.plan.world import settings_for
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Request

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
    """Processor time in ns, and what was done in it."""

    scheduler_ns: int = 0
    cache_ns: int = 0
    steps: int = 0
    ended: int = 0
    tokens: int = 0


class FleetWorld:
    """`clock` is read around what is measured; it tells processor time in ns."""

    def __init__(self, num_workers: int, clock: Callable[[], int]) -> None:
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
        # The tokens of a step are of all workers; what each takes, it says itself.
        self._core = SchedulerCore(settings_for(self._size, PREFILL_TOKENS))
        self._epoch = self._attach()

    def _attach(self) -> SchedulerEpoch:
        epoch = self._index.attach_client(SchedulerEpoch(0), 0)
        self._core.index_attached(epoch, EPOCH, True, 0)
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
            )
            self._index.receive_worker(name, registration, 0)
        for effect in self._index.take_effects():
            match effect:
                case ToClientEffect(_, message):
                    self._core.index_message(message, 0)
                case ToWorkerEffect(worker_id, Registered() as registered):
                    self._core.worker_attached(worker_id, registered.worker_epoch, True, 0)
        return epoch

    def warm_up(self) -> None:
        """Until as many have ended as run at a time: ends and block boundaries are spread over the steps then."""
        while self.spent.ended < self._size:
            self.turn()
        self.spent = Spent()

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._now_ns / 1e9

    def turn(self) -> None:
        """The next turn of the scheduler, with all results that have come by then."""
        while self._to_ask:
            self._submit(self._to_ask.popleft())
        results = []
        if self._ends:
            self._now_ns = max(self._now_ns, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._now_ns + TURN_NS:
            end_ns, name = heappop(self._ends)
            results.append((name, self._workers[name].result(self._plans[name].popleft())))
            self._start(name, end_ns)
        began = self._clock()
        for name, result in results:
            self._core.worker_result(name, result, self._now_ns)
        self.spent.scheduler_ns += self._clock() - began
        self.spent.steps += len(results)
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
        began = self._clock()
        refused = self._core.submit(request, self._now_ns)
        self.spent.scheduler_ns += self._clock() - began
        assert refused is None, refused
        self._tenants[f"r{number}"] = tenant

    def _decide(self) -> None:
        """Until neither core has anything to say to the other."""
        while True:
            began = self._clock()
            effects = self._core.advance(self._now_ns)
            self.spent.scheduler_ns += self._clock() - began
            for name, plan in effects.plans:
                self._plans[name].append(plan)
                if len(self._plans[name]) == 1:
                    self._start(name, self._now_ns)
            self.spent.tokens += sum(len(batch.numbers) // 4 for batch in effects.tokens)
            for output in effects.outputs:
                assert output.error is None, output.error
                if output.finish is not None:
                    self.spent.ended += 1
                    self._to_ask.append(self._tenants.pop(output.request_id))
            if not effects.to_index:
                return
            self._ask(effects.to_index)

    def _ask(self, messages: tuple[FromClient, ...]) -> None:
        began = self._clock()
        for message in messages:
            self._index.receive_client(self._epoch, message, self._now_ns)
        answers = self._index.take_effects()
        self.spent.cache_ns += self._clock() - began
        self._hear(answers)

    def _hear(self, effects: Sequence[Effect]) -> None:
        began = self._clock()
        for effect in effects:
            if isinstance(effect, ToClientEffect):
                self._core.index_message(effect.message, self._now_ns)
        self.spent.scheduler_ns += self._clock() - began

    def _tick(self) -> None:
        self._ticked_ns = self._now_ns
        began = self._clock()
        self._index.heard_client(self._epoch, self._now_ns)
        for name in self._workers:
            self._index.heard_worker(name, self._now_ns)
        self._index.tick(self._now_ns)
        effects = self._index.take_effects()
        self.spent.cache_ns += self._clock() - began
        self._hear(effects)

    def _start(self, name: WorkerId, now_ns: int) -> None:
        """The worker's next step, if it has been sent one."""
        if self._plans[name]:
            heappush(self._ends, (now_ns + STEP_NS, name))
