"""A scheduler core driven by hand: one worker "w", blocks of 4 tokens, every answer and result given by the test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, LeaseId, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Acquire,
    Answer,
    AnswerBatch,
    Distrust,
    Distrusted,
    Extend,
    Extended,
    Grant,
    NoCapacity,
    NoCapacityReason,
    Op,
    OpBatch,
    Publish,
    Published,
    Released,
    Retain,
    Retained,
    WorkerInfo,
    Workers,
)
from coppice.messages.step import Refusal, SamplingParams, StepPlan, StepResult
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects, Output, Refused, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE
from tests.fakes.scheduler.scheduler_worker import u32

BLOCK = 4
MS = 1_000_000
W = WorkerId("w")


def tokens_of(count: int, first: int = 100) -> bytes:
    return np.arange(first, first + count, dtype="<u4").tobytes()


def rows_of(plan: StepPlan) -> dict[int, int]:
    return dict(zip(u32(plan.rows), u32(plan.row_tokens), strict=True))


class Bench:
    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        *,
        num_blocks: int = 64,
        limits: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.settings = settings or SchedulerSettings(
            instance=b"instance", max_running=8, max_step_tokens=64, extend_more_blocks=0
        )
        self.core = SchedulerCore(self.settings)
        self.now_ns = 0
        self.batches: list[tuple[Op, ...]] = []  # without an answer
        self.other_messages: list[object] = []
        self.plans: list[StepPlan] = []  # without a result
        self.outputs: list[Output] = []
        self.num_blocks = num_blocks
        self.limits = limits  # of the worker: max_sequences, max_step_tokens, max_context
        self.cache_epoch = CacheEpoch(1)
        self._next_block = 0
        self._names: dict[int, str] = {}  # of the requests, by number
        self.hold = False  # True: submitted requests wait for the next `advance`, to come in together
        self.core.index_attached(SchedulerEpoch(1), self.cache_epoch, True, 0)
        self.list_workers(1)
        self.core.worker_attached(W, WorkerEpoch(1), True, 0)
        self.advance()

    def list_workers(self, *epochs: int, open_: bool = True) -> None:
        """Worker "w", if an epoch is given, as the cache service lists it."""
        infos = tuple(
            WorkerInfo(W, WorkerEpoch(epoch), "here:0", self.num_blocks, BLOCK, NAMESPACE, "m", open_, *self.limits)
            for epoch in epochs
        )
        self.core.index_message(Workers(self.cache_epoch, infos), self.now_ns)

    # --- requests

    def submit(self, name: str, num_tokens: int, max_new: int = 4, **fields: object) -> Refused | None:
        request = Request(
            request_id=name,
            tenant=str(fields.pop("tenant", "t")),
            domain=DomainId(str(fields.pop("domain", "d"))),
            tokens=tokens_of(num_tokens),
            sampling=SamplingParams(),
            max_new_tokens=max_new,
            number=len(self._names) + 1,
        )
        self._names[request.number] = name
        refused = self.core.submit(replace(request, **fields), self.now_ns)  # type: ignore[arg-type]
        if not self.hold:
            self.advance()
        return refused

    def cancel(self, name: str) -> None:
        self.core.cancel(name, self.now_ns)
        self.advance()

    # --- time and effects

    def advance(self, after_ms: float = 0) -> Effects:
        self.now_ns += int(after_ms * MS)
        effects = self.core.advance(self.now_ns)
        for message in effects.to_index:
            if isinstance(message, OpBatch):
                self.batches.append(message.ops)
            else:
                self.other_messages.append(message)
        assert all(worker_id == W for worker_id, _ in effects.plans)
        self.plans += [plan for _, plan in effects.plans]
        for batch in effects.tokens:
            for number, token in zip(u32(batch.numbers), u32(batch.tokens), strict=True):
                self.outputs.append(Output(self._names[number], token.to_bytes(4, "little")))
        self.outputs += effects.outputs
        self.core.check()
        return effects

    def last(self, name: str) -> Output:
        """The terminal output of a request."""
        (output,) = [o for o in self.outputs if o.request_id == name and o.finish is not None]
        return output

    def text(self, name: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in u32(output.tokens)]

    # --- the cache service

    def ops(self, kind: type[Op]) -> list[Op]:
        """Unanswered ops of one kind."""
        return [op for batch in self.batches for op in batch if isinstance(op, kind)]

    def handles(self, count: int) -> bytes:
        first = self._next_block
        self._next_block += count
        epoch = make_generation(self.cache_epoch, 1)
        return np.array([pack_handle(BlockId(first + i), epoch) for i in range(count)], dtype="<u8").tobytes()

    def yes(self, op: Op, *, cached_blocks: int = 0, epoch: int = 1) -> Answer:
        """The answer that gives an op what it asks for."""
        if isinstance(op, Acquire):
            owned = self.handles(-(-op.reserve_tokens // BLOCK) - cached_blocks)
            return Grant(
                lease_id=op.lease_id,
                worker_id=W,
                worker_epoch=WorkerEpoch(epoch),
                num_cached_tokens=cached_blocks * BLOCK,
                shared=self.handles(cached_blocks),
                shared_seals=b"s" * 16 * cached_blocks,
                owned=owned,
                zero=owned[:8],
            )
        if isinstance(op, Extend):
            have = self.reserved_blocks(op.lease_id)
            owned = self.handles(-(-op.reserve_tokens // BLOCK) - have)
            return Extended(op.lease_id, have, owned, b"")
        if isinstance(op, Publish):
            count = op.num_named_blocks + len(op.tokens) // (4 * BLOCK)
            return Published(op.lease_id, op.first_block + count, self.handles(count), b"p" * 16 * count)
        if isinstance(op, Retain):
            return Retained(op.lease_id, op.end_token - op.first_token)
        return Distrusted(op.lease_id) if isinstance(op, Distrust) else Released(op.lease_id)

    def reserved_blocks(self, lease_id: LeaseId) -> int:
        return self.core._life.leases.leases[lease_id].reserved_tokens // BLOCK

    def answer(self, *, cached_blocks: int = 0) -> None:
        """Say yes to every op that waits now; what those answers lead to waits."""
        while self.batches:
            ops = self.batches.pop(0)
            answers = tuple(self.yes(op, cached_blocks=cached_blocks) for op in ops)
            self.core.index_message(AnswerBatch(self.cache_epoch, answers), self.now_ns)
        self.advance()

    def settle(self) -> None:
        """Say yes until nothing waits."""
        while self.batches:
            self.answer()

    def answer_with(self, *answers: Answer) -> None:
        """Answer the oldest batch."""
        assert [answer.lease_id for answer in answers] == [op.lease_id for op in self.batches.pop(0)]
        self.core.index_message(AnswerBatch(self.cache_epoch, answers), self.now_ns)
        self.advance()

    def no(self, op: Op, reason: NoCapacityReason, retry_after_ms: int = 50) -> NoCapacity:
        return NoCapacity(op.lease_id, reason, retry_after_ms)

    # --- the worker

    def result(
        self,
        sampled: Mapping[int, int | list[int]] | None = None,
        refusals: tuple[Refusal, ...] = (),
        duration_us: int = 0,
    ) -> StepPlan:
        """Complete the oldest plan. One token for all of its steps, or one for each."""
        plan = self.plans.pop(0)
        given = {row: [t] * plan.num_decode_steps if isinstance(t, int) else t for row, t in (sampled or {}).items()}
        result = StepResult(
            step=plan.step,
            sampled_ids=np.array(list(given), dtype="<u4").tobytes(),
            sampled_tokens=np.array(list(given.values()), dtype="<u4").T.tobytes(),
            refusals=refusals,
            duration_us=duration_us,
        )
        self.core.worker_result(W, result, self.now_ns)
        self.advance()
        return plan
