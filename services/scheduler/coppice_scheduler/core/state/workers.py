"""One worker as the scheduler knows it: its sequences, its plans in flight, what its next plan must say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coppice.ids import BlockId, CacheEpoch, DomainId, LeaseId, SequenceId, WorkerEpoch, WorkerId
from coppice.messages.index import DEAD_EPOCHS_MAX, NoCapacityReason, WorkerInfo
from coppice.messages.step import StepPlan
from coppice_scheduler.core.state.estimates import ServiceRate
from coppice_scheduler.core.state.leases import Lease
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import Sequence
from coppice_scheduler.core.state.slot_table import Bool, Int64, SlotTable, UInt32

# What a decode stands for against a newcomer's prefill: it takes part in each of its steps and reads its KV there.
DECODE_LOAD_TOKENS = 16


class Row(NamedTuple):
    """What one sequence computes in one step."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    num_prefill: int  # of them, tokens that were known when the sequence was granted


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The rows of a plan, in its order. All arrays have shape [R]."""

    slots: Int64
    ids: UInt32  # sequences: a slot may have another one by the time of the result
    num_tokens: Int64
    samples: Bool
    num_prefill: Int64
    is_decode: bool  # each computes one token

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan without a result."""

    plan: StepPlan
    rows: PlanRows
    removed: tuple[Sequence, ...]
    planned_ns: int


@dataclass(slots=True, eq=False)
class Stall:
    """A running sequence whose next token has no block, and was refused one."""

    sequence: Sequence
    reason: NoCapacityReason
    since_ns: int
    retry_ns: int
    refused: bool = True  # False: something came back since, it asks again before anybody is preempted


@dataclass(slots=True, eq=False)
class Worker:
    worker_id: WorkerId
    epoch: WorkerEpoch = WorkerEpoch(0)
    attached: bool = False  # the epoch lives and plans may be sent, as far as is known
    connected: bool = False
    abandoned: bool = False  # its leases were given up: it was gone for too long, or nobody listens where it was
    loss_is_counted: bool = False  # what it computed is suspected already, though its epoch may live
    lost_ns: int = 0
    yields_since_ns: int | None = None  # another scheduler is to have it; None: nobody asked
    info: WorkerInfo | None = None
    copies_blocks: bool = False  # it knows `SequenceStart.copy_source`
    max_sequences: int | None = None  # that it may be given at once; None: it has not said. Kept while it is unlisted
    max_step_tokens: int | None = None  # that one step of it may compute
    rate: ServiceRate = field(default_factory=ServiceRate)
    listed_by: CacheEpoch = CacheEpoch(0)  # incarnation of the cache service that listed it last
    dead_epochs: dict[WorkerEpoch, None] = field(default_factory=dict)  # the latest, as far as anybody may ask
    next_step: int = 1
    in_flight: deque[InFlight] = field(default_factory=deque)
    table: SlotTable[Sequence] = field(default_factory=SlotTable)  # of those running
    running: dict[SequenceId, Sequence] = field(default_factory=dict)
    to_detach: list[Sequence] = field(default_factory=list)
    returning: dict[LeaseId, Lease] = field(default_factory=dict)  # on their way back: credit against preemption
    stalled: dict[SequenceId, Stall] = field(default_factory=dict)
    wants_blocks: dict[SequenceId, Sequence] = field(default_factory=dict)
    copying: dict[SequenceId, Sequence] = field(default_factory=dict)  # granted, and to copy what a relative has
    sealed: bytearray = field(default_factory=bytearray)
    seals: bytearray = field(default_factory=bytearray)
    resealed: dict[BlockId, tuple[int, int]] = field(
        default_factory=dict
    )  # handles, and the step that repeats the seal
    decode_step_us: float = 0.0  # mean of the latest; 0 = unknown
    chunk_token_us: float = 0.0  # the same, of a token in a step with chunks
    result_ns: int = 0  # when its latest result came
    last_decode_rows: bytes = b""  # rows of the last plan if it was pure decode, else empty

    def bury(self, epoch: WorkerEpoch) -> None:
        """This epoch is over, for ever: what ran there is given up."""
        self.dead_epochs.pop(epoch, None)
        self.dead_epochs[epoch] = None
        if len(self.dead_epochs) > DEAD_EPOCHS_MAX:
            del self.dead_epochs[next(iter(self.dead_epochs))]

    @property
    def usable(self) -> bool:
        return self.attached and self.connected

    @property
    def is_stranger(self) -> bool:
        """Not listed and never attached: nothing of ours was ever there, and any number of ids may come and go."""
        return self.info is None and not self.connected and not self.epoch and not self.dead_epochs

    @property
    def open(self) -> bool:
        """It may be given new requests."""
        info = self.info
        return self.usable and info is not None and info.is_owned and info.open and info.worker_epoch == self.epoch

    def take_info(self, info: WorkerInfo) -> None:
        """What the cache service lists. Every sequence needs one token of a step to decode, so that bounds them too."""
        self.info = info
        self.max_step_tokens = info.max_step_tokens or None
        limits = [limit for limit in (info.max_sequences, info.max_step_tokens) if limit]
        self.max_sequences = min(limits) if limits else None

    @property
    def is_left(self) -> bool:
        """Nothing of ours is there, and nothing is on its way there or back."""
        return not (self.running or self.in_flight or self.to_detach or self.returning)

    def has_context_for(self, num_tokens: int) -> bool:
        """A sequence of so many tokens, prompt and output together, fits its tables."""
        return self.info is None or not self.info.max_context or num_tokens <= self.info.max_context

    def is_short(self, domain: DomainId, *, past: bool) -> bool:
        """A sequence waits for a block here that a new one of this domain might take from it.

        `past`: the new one asks for what is its domain's by right, so that others' shortages do not concern it.
        """
        if not self.stalled:
            return False
        reasons = {NoCapacityReason.NO_WORKER} if past else {NoCapacityReason.NO_WORKER, NoCapacityReason.POOL_FULL}
        return any(stall.sequence.lease.domain == domain or stall.reason in reasons for stall in self.stalled.values())

    def load_tokens(self, own: DomainId | None = None) -> int:
        """Work that stands before a new request, in tokens of prefill. `own`: only what this domain has there."""
        table = self.table
        counted = table.ids != 0
        if own is not None:
            counted = np.zeros_like(counted)
            counted[[s.slot for s in self.running.values() if s.lease.domain == own]] = True
        to_plan = table.num_known + table.num_pending - table.num_planned
        return int(np.maximum(to_plan, DECODE_LOAD_TOKENS)[counted].sum())

    def unplanned_prefill(self) -> tuple[Int64, Int64]:
        """[S] numbers of tenants and [S] tokens of prefill that each running sequence has still to be planned."""
        table = self.table
        used = np.flatnonzero(table.ids)
        return table.tenants[used], np.maximum(table.num_start[used] - table.num_planned[used], 0)

    def error(self, code: OutputErrorCode, what: str) -> OutputError:
        """`what` went wrong with a request here; the client may send it again in a second."""
        return OutputError(code, f"worker {self.worker_id} {what}", retry_after_ms=1000)

    def restart_steps(self) -> None:
        self.next_step = 1
        self.in_flight.clear()
        self.to_detach.clear()
        self.resealed.clear()
        self.last_decode_rows = b""


def lost_in_work(worker: Worker) -> OutputError:
    return worker.error(OutputErrorCode.WORKER_LOST, "was lost while it computed this request; send it again")


def nobody_listens(worker: Worker) -> OutputError:
    return worker.error(OutputErrorCode.WORKER_LOST, "is gone: nobody listens at its address; send it again")


def unreachable(worker: Worker, absent_ms: int) -> OutputError:
    return worker.error(OutputErrorCode.WORKER_LOST, f"has not been reachable for {absent_ms} ms; send it again")
