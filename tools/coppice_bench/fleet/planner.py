"""One of a cell's planners: the real core of a scheduler, what it has told of itself, and the time that it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import ToClient, Workers
from coppice.messages.step import StepResult
from coppice_bench.plan.world import settings_for
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.policy.placement import PlannerLoad
from coppice_scheduler.core.state.request import Effects, Request
from coppice_scheduler.core.state.settings import TenantLimits


class Planner:
    """`rows`: sequences of all workers that it will own; `rows_of_cell`: of all workers. `clock` tells processor time
    in ns."""

    def __init__(
        self, epoch: SchedulerEpoch, rows: int, rows_of_cell: int, prefill_tokens: int, clock: Callable[[], int]
    ) -> None:
        # The tokens of a step are of all workers; what each takes, it says itself.
        settings, at_once = settings_for(rows, prefill_tokens), 2 * rows_of_cell + 64
        limits = TenantLimits(max_concurrency=at_once, max_queued=at_once)
        self.core = SchedulerCore(replace(settings, max_queued=at_once, default_limits=limits))
        self.epoch = epoch
        self.spent_ns = 0
        self.ended = 0
        self.owned: frozenset[WorkerId] = frozenset()  # as its session was told
        self.is_due = False  # it heard something since its last turn
        self._clock = clock
        self._num_blocks = 0
        self._told_tokens = 0  # waiting or unplanned, when it last told
        self._sent_tokens = 0  # that came since
        self._prompts_before = (0, 0)

    def begin(self) -> None:
        """Count from here."""
        self.spent_ns = self.ended = 0
        self._prompts_before = self._prompts

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Found cached, and computed."""
        (cached, computed), (cached_before, computed_before) = self._prompts, self._prompts_before
        return cached - cached_before, computed - computed_before

    @property
    def _prompts(self) -> tuple[int, int]:
        stats = self.core.stats()
        return stats.total_cached_tokens, stats.total_prefill_tokens

    def attached(self, cache_epoch: CacheEpoch) -> None:
        self.core.index_attached(self.epoch, cache_epoch, True, 0)

    def worker_attached(self, worker_id: WorkerId, worker_epoch: WorkerEpoch) -> None:
        self.core.worker_attached(worker_id, worker_epoch, True, 0)

    def hear(self, messages: Sequence[ToClient], now_ns: int) -> None:
        began = self._clock()
        for message in messages:
            self.core.index_message(message, now_ns)
        self.spent_ns += self._clock() - began
        self.is_due = self.is_due or bool(messages)
        for message in messages:
            if isinstance(message, Workers):
                owned = [info for info in message.workers if info.is_owned]
                self.owned = frozenset(info.worker_id for info in owned)
                self._num_blocks = sum(info.num_blocks for info in owned)

    def take(self, results: Iterable[tuple[WorkerId, StepResult]], now_ns: int) -> None:
        began = self._clock()
        for worker_id, result in results:
            self.core.worker_result(worker_id, result, now_ns)
        self.spent_ns += self._clock() - began
        self.is_due = True

    def submit(self, request: Request, num_left: int, now_ns: int) -> None:
        """`num_left`: tokens of its prompt that are not cached here, as far as is known."""
        began = self._clock()
        refused = self.core.submit(request, now_ns)
        self.spent_ns += self._clock() - began
        assert refused is None, refused
        self._sent_tokens += num_left
        self.is_due = True

    def advance(self, now_ns: int) -> Effects:
        self.is_due = False
        began = self._clock()
        effects = self.core.advance(now_ns)
        self.spent_ns += self._clock() - began
        return effects

    # ---- what front doors know

    def tell_load(self) -> None:
        """What a front door hears now and then."""
        life = self.core._life
        unplanned = sum(int(worker.unplanned_prefill()[1].sum()) for worker in life.workers.values())
        self._told_tokens, self._sent_tokens = life.counts.waiting_tokens + unplanned, 0

    @property
    def load(self) -> PlannerLoad:
        return PlannerLoad(
            is_ready=True,
            num_blocks=self._num_blocks,
            load_tokens=self._told_tokens + self._sent_tokens,
            num_workers=len(self.owned),
        )
