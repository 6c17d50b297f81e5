"""The worker's side of the two sessions, without a device: who may plan here, what a plan does, what it answers.

    Registered     attach_scheduler        apply      (zero, copy, execute)      complete
    ----------> . ------------------> . ----------> . ----------------------> . ---------> . apply ...
                                                                               fence, registered: only here
    order_copies, copied: at any time, beside a step

One applied step is outstanding at most. Plans come in steps without gaps; a lower one gets its result again. A
refusal concerns one sequence, touches nothing of it, and stays until the sequence is detached: the next plan is on
its way already and must skip it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from coppice.handles import handles_array
from coppice.ids import TOKEN_BYTES, CacheEpoch, LeaseId, SchedulerEpoch, SequenceId, WorkerEpoch
from coppice.messages.registration import CopiesDone, CopyOrders, Draining, Fence, FenceAck, Owner, Register, Registered
from coppice.messages.step import Refusal, RefusalCode, StepPlan, StepResult
from coppice.session.vouchers import is_same, scheduler_voucher
from coppice_worker.core.attach import Attacher
from coppice_worker.core.batch.guides import OpenGuide
from coppice_worker.core.batch.logprobs import LogprobCollector
from coppice_worker.core.batch.plan_shape import check_shape
from coppice_worker.core.batch.sampled import SampledTokens
from coppice_worker.core.batch.step_batch import StepBatch, StepOutput
from coppice_worker.core.batch.steps import (
    Applied,
    MalformedPlanError,
    Replayed,
    SchedulerAccepted,
    SchedulerRefused,
    SchedulerRefusedReason,
    StepGap,
    WorkerCoreSettings,
    WorkerStats,
)
from coppice_worker.core.blocks.copies import NONE_FAILED, CopyBooks, Ordered
from coppice_worker.core.blocks.fences import FencedLeases
from coppice_worker.core.blocks.pool import BlockPool
from coppice_worker.core.check import check_users
from coppice_worker.core.rows import NO_ROWS, Computation, RowBuilder
from coppice_worker.core.sequences import SequenceTable
from coppice_worker.core.sources import copy_sources
from coppice_worker.core.who_plans import WhoPlans

_NO_BLOCKS = np.zeros(0, np.int32)
Said = tuple[CopiesDone | None, tuple[FenceAck, ...]]


class WorkerCore:
    """Pure state of one worker. Every method is a step of a deterministic machine."""

    def __init__(self, settings: WorkerCoreSettings, open_guide: OpenGuide | None = None) -> None:
        """`open_guide` makes guides for sequences that want a grammar; without it they are refused."""
        self.settings, self.worker_epoch = settings, WorkerEpoch(0)
        size = settings.pool.block_size
        self.pool = BlockPool(settings.pool.num_blocks)
        self.host_pool, self.disk_pool = BlockPool(settings.num_host_blocks), BlockPool(settings.num_disk_blocks)
        self.sequences = SequenceTable(settings.max_sequences, settings.max_context, size, open_guide)
        self._rows = RowBuilder(self.sequences, self.pool, size, settings.max_step_tokens)
        self._attacher = Attacher(self.pool, self.sequences)
        self._copies = CopyBooks(self.pool, self.host_pool, self.disk_pool, settings.max_copy_orders)
        self._registered = Registered(WorkerEpoch(0), CacheEpoch(0))  # the last one
        self._who = WhoPlans()
        self._attachment = self._last_step = 0
        self.is_draining = False  # it takes no new lease, as the next registration says
        self._drains_as: WorkerEpoch | None = None  # under which epoch it said so last; None: its registration does
        self._fenced_leases = FencedLeases(settings.max_fenced_leases)
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        self._refused: dict[SequenceId, Refusal] = {}
        self._outstanding: Applied | None = None
        self._sampled, self._logprobs = SampledTokens(), LogprobCollector()  # of the outstanding plan
        self._tokens_computed = self._tokens_sampled = self._steps = self._replays = self._ignored_seals = 0
        self._refusal_counts = dict.fromkeys(RefusalCode, 0)

    # -- the cache service

    def registration(self) -> Register:
        """The first message of every fresh session with a cache service.

        Fences of an earlier session are not acknowledged any more: they are said again where they still matter.
        """
        self._copies.forget_fences()
        self._drains_as = None
        device, host, disk = (pool.packed() for pool in (self.pool, self.host_pool, self.disk_pool))
        return Register(
            worker_id=self.settings.worker_id,
            worker_epoch=self.worker_epoch,
            address=self.settings.address,
            num_blocks=self.settings.pool.num_blocks,
            block_size=self.settings.pool.block_size,
            namespace=self.settings.namespace,
            model=self.settings.model,
            highest_cache_epoch=self._registered.cache_epoch,
            generations=device[0],
            seals=device[1],
            scheduler_epochs=() if self.planning is None else (self.planning,),
            max_sequences=self.settings.max_sequences,
            max_step_tokens=self.settings.max_step_tokens,
            max_context=self.settings.max_context,
            draining=self.is_draining,
            num_host_blocks=self.settings.num_host_blocks,
            host_generations=host[0],
            host_seals=host[1],
            voucher=self._registered.voucher,
            knows_owners=True,
            num_disk_blocks=self.settings.num_disk_blocks,
            disk_generations=disk[0],
            disk_seals=disk[1],
            disk_epoch=self.disk_pool.epoch,
        )

    def drain(self) -> Draining:
        """From now on every registration says that this worker takes no new lease; so does the returned message."""
        self.is_draining, self._drains_as = True, self.worker_epoch
        return Draining(self.worker_epoch)

    def said_again(self) -> Draining | None:
        """After `registered`: what it said meanwhile concerned nobody, if it named an epoch that is over now."""
        is_lost = self.is_draining and self._drains_as not in (None, self.worker_epoch)
        return self.drain() if is_lost else None

    def registered(self, message: Registered) -> bool:
        """True when the epoch changed: everything that the old one knew is gone, schedulers attach again.

        The caller guarantees that the device is quiet (no outstanding step and no copy will write any more), and zeroes
        the whole pool when the old epoch was not 0: from now on nobody can tell whose bytes are where (I15). What is
        below needs no zeroing: nothing of a domain that asks for it was ever there, and the rest is unreadable.
        """
        if message.cache_epoch != self._registered.cache_epoch:
            self._copies.forget_orders()
        self._registered = message
        self._attacher.cache_epoch = message.cache_epoch
        self._name_owner(message.owner)
        if message.worker_epoch == self.worker_epoch:
            return False
        self.worker_epoch = message.worker_epoch
        self._outstanding = None
        self._detach_scheduler()
        # Whoever comes shows a voucher for the new epoch, and had to live for that after all that was said of the old.
        self._who = WhoPlans()
        self._who.name(message.owner)
        self._fenced_leases.clear()
        self._copies.forget(message)
        self.pool.reset()
        return True

    def owned(self, message: Owner) -> None:
        """Another scheduler is to plan here. What is said to whoever had this id before concerns nobody."""
        if message.worker_epoch == self.worker_epoch:
            self._name_owner(message.owner)

    def _name_owner(self, owner: SchedulerEpoch) -> None:
        if self._who.name(owner):
            self._detach_scheduler()

    def fence(self, message: Fence) -> FenceAck | None:
        """Never again run what is named. Called when all earlier steps have completed.

        None while copies are under way: `copied` gives the acknowledgement when the last of them is over.
        """
        assert self._outstanding is None, "a fence waits for the outstanding step"
        if self._who.fence(message):
            self._detach_scheduler()
        if message.worker_epoch == self.worker_epoch:
            self._fence_leases(message.lease_ids)
        return None if self._copies.hold_up(message) else self._acknowledge(message)

    def _acknowledge(self, message: Fence) -> FenceAck:
        if message.worker_epoch != self.worker_epoch or not message.report:
            return FenceAck(message.fence_id, self.worker_epoch)
        arrays = (array for pool in (self.pool, self.host_pool, self.disk_pool) for array in pool.packed())
        return FenceAck(message.fence_id, self.worker_epoch, *arrays)

    def order_copies(self, message: CopyOrders) -> Ordered:
        """What the caller copies now, in whatever order and beside steps, and what it answers at once."""
        return self._copies.take(message, self.worker_epoch)

    def copied(self, numbers: tuple[int, ...], failed: Mapping[int, int] = NONE_FAILED) -> Said:
        """These copies are over, those in `failed` in vain: from which of its blocks on the source has lost them. What
        is of an earlier worker epoch is nobody's."""
        answer, fences = self._copies.finish(numbers, self.worker_epoch, failed)
        return answer, tuple(self._acknowledge(fence) for fence in fences)

    def _fence_leases(self, leases: Iterable[LeaseId]) -> None:
        self._fenced_leases.add(leases)
        for sequence_id, slot in list(self.sequences.slot_of.items()):
            if self.sequences.leases[slot] in self._fenced_leases:
                self._attacher.detach(sequence_id)
                self._refused[sequence_id] = Refusal(sequence_id, RefusalCode.FENCED, 0)

    # -- schedulers

    @property
    def planning(self) -> SchedulerEpoch | None:
        """The scheduler epoch that plans here."""
        return self._who.planning

    @property
    def attachment(self) -> int:
        """Changes whenever a scheduler's sequences are dropped all at once: a takeover, a fence, a new epoch."""
        return self._attachment

    def why_not_trust(self, epoch: SchedulerEpoch, voucher: bytes) -> SchedulerRefused | None:
        """Whether the cache service vouches for this epoch here. Asked before anything that it could change."""
        if self.worker_epoch == 0:
            return SchedulerRefused(SchedulerRefusedReason.NOT_REGISTERED)
        key = self._registered.scheduler_key
        if not key or not is_same(voucher, scheduler_voucher(key, epoch)):
            return SchedulerRefused(SchedulerRefusedReason.UNVOUCHED)
        return None

    def attach_scheduler(self, epoch: SchedulerEpoch) -> SchedulerAccepted | SchedulerRefused:
        """A trusted scheduler opens a new session. If it may plan here, it takes over from whoever did.

        A reconnect within a session does not come here. So an epoch that plans here already has given up its earlier
        session and everything in it: it starts over, too, and nothing that was sent there may be applied any more.
        """
        if self.worker_epoch == 0:
            return SchedulerRefused(SchedulerRefusedReason.NOT_REGISTERED)
        if (reason := self._who.why_not(epoch)) is not None:
            return SchedulerRefused(reason)
        took_over = self.planning not in (None, epoch)
        self._detach_scheduler()
        self._who.begin(epoch)
        return SchedulerAccepted(self.worker_epoch, took_over)

    def _detach_scheduler(self) -> None:
        """Nobody plans here; the steps of the next scheduler start at 1."""
        self._who.planning, self._last_step = None, 0
        self._attachment += 1
        self._results.clear()
        self._refused.clear()
        self.sequences.clear()
        self._attacher.forget_users()
        self._copies.hold_device_blocks()
        self._rows.forget()

    def apply(self, epoch: SchedulerEpoch, plan: StepPlan) -> Applied | Replayed | StepGap:
        """Detach, seal, copy and zero, attach, grow, and say what to compute.

        Raises MalformedPlanError, with nothing applied, for a plan that no correct scheduler sends.
        """
        assert self._outstanding is None, "a step is outstanding; complete it first"
        if epoch != self.planning:
            return self._begin(self._refuse_all(plan))
        if plan.step <= self._last_step and plan.step in self._results:
            self._replays += 1
            return Replayed(self._results[plan.step])
        if plan.step != self._last_step + 1:
            return StepGap(self._last_step + 1)
        check_shape(plan, self.sequences.slot_of, self.settings.pool.block_size)
        self._check_refused_limit(plan)
        return self._begin(self._apply_next(epoch, plan))

    def _apply_next(self, epoch: SchedulerEpoch, plan: StepPlan) -> Applied:
        sources = copy_sources(plan, self.sequences, self._refused)
        for sequence_id in np.frombuffer(plan.detach, "<u4").tolist():
            self._refused.pop(SequenceId(sequence_id), None)
            self._attacher.detach(SequenceId(sequence_id))
        if plan.sealed:
            self._ignored_seals += self.pool.set_seals(handles_array(plan.sealed), plan.seals)
        refusals: dict[SequenceId, Refusal] = {}
        blocks = self._attacher.attach_and_grow(plan, self._refused, self._fenced_leases, sources, refusals)
        computed = self._compute(plan, refusals)
        self._refused.update(refusals)
        return Applied(
            step=plan.step,
            batch=computed.batch,
            zero=blocks.zero,
            copy_src=blocks.copy_src,
            copy_dst=blocks.copy_dst,
            refusals=tuple(refusals.values()),
            sampled_ids=computed.sampled_ids,
            rows=computed.rows,
            attachment=self._attachment,
            num_steps=plan.num_decode_steps,
            num_steps_left=1 if computed.batch is None else plan.num_decode_steps,
        )

    def _compute(self, plan: StepPlan, refusals: dict[SequenceId, Refusal]) -> Computation:
        if plan.repeat_rows:
            unhurt = not self._refused and not refusals
            if unhurt and (repeated := self._rows.repeat(plan.num_decode_steps)) is not None:
                return repeated
            ids = self._rows.previous
            row_tokens = np.ones(len(ids), np.int64)
        else:
            ids = [SequenceId(sequence_id) for sequence_id in np.frombuffer(plan.rows, "<u4").tolist()]
            row_tokens = np.frombuffer(plan.row_tokens, "<u4").astype(np.int64)
        return self._rows.build(ids, row_tokens, plan.num_decode_steps, self._refused, refusals)

    def _refuse_all(self, plan: StepPlan) -> Applied:
        """The answer to an epoch that does not plan here (fenced, superseded, or of the old worker epoch)."""
        named = [start.sequence_id for start in plan.attach] + [growth.sequence_id for growth in plan.grow]
        named += [SequenceId(int.from_bytes(plan.rows[at : at + 4], "little")) for at in range(0, len(plan.rows), 4)]
        refusals = tuple(Refusal(sequence_id, RefusalCode.FENCED, 0) for sequence_id in dict.fromkeys(named))
        return Applied(plan.step, None, _NO_BLOCKS, _NO_BLOCKS, _NO_BLOCKS, refusals, b"", NO_ROWS, attachment=-1)

    def _check_refused_limit(self, plan: StepPlan) -> None:
        limit = 4 * self.settings.max_sequences
        if len(self._refused) > limit and not plan.detach:
            raise MalformedPlanError(
                f"step {plan.step}: {len(self._refused)} refused sequences were never detached (limit {limit})"
            )

    def _begin(self, applied: Applied) -> Applied:
        self._outstanding = applied
        self._sampled.clear()
        self._logprobs.clear()
        for refusal in applied.refusals:
            self._refusal_counts[refusal.code] += 1
        return applied

    def advance(self, applied: Applied, output: StepOutput) -> Applied | None:
        """The next step of a plan of several decode steps, after the device did `applied`.

        None, and nothing done, when that was the last one, or when the scheduler was replaced meanwhile: `complete`
        it with the same output.
        """
        assert applied is self._outstanding, "advance what was applied last"
        if applied.num_steps_left == 1 or applied.attachment != self._attachment:
            return None
        self._take(applied, output)
        batch, num_left = self._rows.follow().batch, applied.num_steps_left - 1
        self._outstanding = replace(
            applied, batch=batch, zero=_NO_BLOCKS, copy_src=_NO_BLOCKS, copy_dst=_NO_BLOCKS, num_steps_left=num_left
        )
        return self._outstanding

    def ahead(self, applied: Applied) -> StepBatch | None:
        """The batch that `advance` will give after `applied`, but for its tokens; None after the last one."""
        assert applied is self._outstanding, "look ahead of what was applied last"
        is_last = applied.num_steps_left == 1 or applied.attachment != self._attachment
        return None if is_last else self._rows.ahead()

    def complete(self, applied: Applied, output: StepOutput, duration_us: int = 0) -> StepResult:
        """The device has done `applied`, the last step of its plan. The result is kept for a repeated plan; a step of a
        scheduler that was replaced meanwhile leaves no trace."""
        assert applied is self._outstanding, "complete what was applied last"
        self._outstanding = None
        if applied.attachment != self._attachment:
            return StepResult(applied.step, refusals=applied.refusals, duration_us=duration_us)
        assert applied.num_steps_left == 1, "steps of the plan are left; advance first"
        self._attacher.copies_are_done()
        self._take(applied, output)
        ids, tokens, broken = self._sampled.give(applied)
        self._refused.update({refusal.sequence_id: refusal for refusal in broken})
        self._refusal_counts[RefusalCode.GRAMMAR] += len(broken)
        num_tokens = int(applied.rows.num_tokens.sum()) * applied.num_steps
        refusals, logprobs = applied.refusals + broken, self._logprobs.give()
        result = StepResult(applied.step, ids, tokens, refusals, num_tokens, duration_us, logprobs)
        self._last_step = applied.step
        self._tokens_computed += result.num_tokens
        self._tokens_sampled += len(result.sampled_tokens) // TOKEN_BYTES
        self._steps += 1
        self._results[applied.step] = result
        while len(self._results) > self.settings.max_retained_results:
            self._results.popitem(last=False)
        return result

    def _take(self, applied: Applied, output: StepOutput) -> None:
        """The tokens of `applied` have KV now, and what was sampled follows them."""
        table, rows = self.sequences, applied.rows
        table.num_computed[rows.slots] += rows.num_tokens
        if applied.batch is None:
            return
        assert len(output.tokens) == len(applied.batch.sample.rows), "one token for every sample row"
        chosen = rows.slots[applied.batch.sample.rows]
        table.tokens[chosen, table.num_tokens[chosen]] = output.tokens
        table.num_tokens[chosen] += 1
        self._logprobs.take(applied.batch, table.ids[rows.slots], output)
        self._sampled.take(table.ids[chosen], output)

    # -- oversight

    def check(self) -> None:
        """Users follow from sequences and copies; one writer per block; nothing sealed is writable (I5-I7)."""
        check_users(self.pool, self.sequences, self._copies, self._attacher.reading)

    def stats(self) -> WorkerStats:
        return WorkerStats(
            tokens_computed=self._tokens_computed,
            tokens_sampled=self._tokens_sampled,
            steps=self._steps,
            replays=self._replays,
            refusals=dict(self._refusal_counts),
            ignored_seals=self._ignored_seals,
            sequences=len(self.sequences),
            blocks_with_users=int(np.count_nonzero(self.pool.has_user())),
            fenced_epochs=len(self._who.fenced),
            fenced_leases=len(self._fenced_leases),
        )
