"""Small named types of the worker core: settings, answers and errors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coppice.ids import Namespace, WorkerEpoch, WorkerId
from coppice.messages.step import Refusal, RefusalCode, StepResult
from coppice.session.frames import RejectCode
from coppice_worker.core.batch.step_batch import Int32, Int64, PoolSpec, StepBatch


class MalformedPlanError(ValueError):
    """A plan that no correct scheduler sends. Nothing of it was applied; its session should be closed."""


@dataclass(frozen=True, slots=True)
class WorkerCoreSettings:
    worker_id: WorkerId
    address: str
    pool: PoolSpec
    namespace: Namespace
    model: str
    max_sequences: int = 256
    max_context: int = 4096  # tokens
    max_step_tokens: int = 8192
    num_host_blocks: int = 0  # of the host tier; 0 = there is none
    num_disk_blocks: int = 0  # of the disk tier, below that of the host
    max_copy_orders: int = 256  # under way at once; what is ordered beyond is refused
    max_retained_results: int = 16  # results that a repeated plan can still be answered with
    max_fenced_leases: int = 1 << 16  # the oldest are forgotten first; generations still protect their blocks


class SchedulerRefusedReason(Enum):
    NOT_REGISTERED = "the worker is not registered with a cache service yet"
    UNVOUCHED = "the cache service does not vouch for this scheduler epoch here; attach to it and hear of its workers"
    FENCED = "this scheduler epoch was fenced; attach to the cache service again for a new one"
    SUPERSEDED = "a newer scheduler epoch plans for this worker; end one of the two schedulers"
    OUTLIVED = "a newer scheduler epoch planned for this worker and is over; get a new one from the cache service"

    @property
    def reject_code(self) -> RejectCode:
        """Whether to come again, or only with a new epoch. While a newer one lives, a new one would only take turns."""
        is_for_ever = self in (SchedulerRefusedReason.FENCED, SchedulerRefusedReason.OUTLIVED)
        return RejectCode.FENCED if is_for_ever else RejectCode.NOT_READY


@dataclass(frozen=True, slots=True)
class SchedulerAccepted:
    worker_epoch: WorkerEpoch
    took_over: bool  # another scheduler epoch planned here before; its sequences are gone


@dataclass(frozen=True, slots=True)
class SchedulerRefused:
    reason: SchedulerRefusedReason


@dataclass(frozen=True, slots=True)
class Rows:
    """The R rows of a step that compute, by slot; all arrays have shape [R]."""

    slots: Int32
    num_tokens: Int64


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan that took effect, or the next step of its burst.

    The caller zeroes, copies, executes `batch`, and calls `advance` until that says that it was the last one; then
    `complete`.
    """

    step: int
    batch: StepBatch | None  # None: nothing to compute
    zero: Int32  # block ids
    copy_src: Int32
    copy_dst: Int32
    refusals: tuple[Refusal, ...]
    sampled_ids: bytes  # u32 sequence ids, in the order of `batch.sample.rows`
    rows: Rows
    attachment: int  # which attachment of a scheduler it belongs to; a later one makes it void
    num_steps: int = 1  # forward passes of the whole plan
    num_steps_left: int = 1  # this one included


@dataclass(frozen=True, slots=True)
class Replayed:
    """The plan was applied before; its result again."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class StepGap:
    """The plan is not the next one, and no retained result answers it. `expected` is the step to send."""

    expected: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    tokens_computed: int
    tokens_sampled: int
    steps: int
    replays: int
    refusals: dict[RefusalCode, int]
    ignored_seals: int  # seals for an occupancy that is over
    sequences: int
    blocks_with_users: int
    fenced_epochs: int
    fenced_leases: int
