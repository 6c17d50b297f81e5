"""Short ways to write plans for a worker core, and a core that is ready for them."""

from __future__ import annotations

import numpy as np

from coppice.handles import pack_handle
from coppice.ids import (
    BlockId,
    CacheEpoch,
    DomainId,
    Generation,
    LeaseId,
    Namespace,
    SchedulerEpoch,
    SequenceId,
    WorkerEpoch,
    WorkerId,
)
from coppice.messages.registration import Registered
from coppice.messages.step import Growth, SamplingParams, SequenceStart, StepPlan, StepResult
from coppice_worker.core.batch.guides import OpenGuide
from coppice_worker.core.batch.step_batch import NO_OUTPUT, Executor, PoolSpec, StepOutput
from coppice_worker.core.batch.steps import Applied, SchedulerAccepted, WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore

BLOCK_SIZE = 4
EPOCH = SchedulerEpoch(7)
GREEDY = SamplingParams(temperature=0.0)


def settings(
    num_blocks: int = 16, max_sequences: int = 8, max_context: int = 64, max_step_tokens: int = 64
) -> WorkerCoreSettings:
    return WorkerCoreSettings(
        worker_id=WorkerId("w"),
        address="localhost:1",
        pool=PoolSpec(num_blocks, BLOCK_SIZE),
        namespace=Namespace(b"ns"),
        model="m",
        max_sequences=max_sequences,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
    )


def ready_core(chosen: WorkerCoreSettings | None = None, open_guide: OpenGuide | None = None) -> WorkerCore:
    """Registered under worker epoch 1, with scheduler epoch 7 attached."""
    core = WorkerCore(chosen or settings(), open_guide)
    assert core.registered(Registered(WorkerEpoch(1), CacheEpoch(1)))
    assert isinstance(core.attach_scheduler(EPOCH), SchedulerAccepted)
    return core


def h(block: int, generation: int = 1) -> int:
    return pack_handle(BlockId(block), Generation(generation))


def handles(*wanted: int) -> bytes:
    return np.array(wanted, "<u8").tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def lease(number: int) -> LeaseId:
    return LeaseId(number.to_bytes(16, "big"))


def seal(number: int) -> bytes:
    return number.to_bytes(16, "big")


def start(
    number: int,
    tokens: int = 4,
    owned: bytes = b"",
    shared: bytes = b"",
    seals: bytes = b"",
    lease_id: LeaseId | None = None,
    computed: int | None = None,
    copy_from: int = 0,
    domain: str = "",
    copy_source: bytes = b"",
    copy_seal: bytes = b"",
) -> SequenceStart:
    """Sequence `number` with tokens 100, 101, ... and lease `number`."""
    return SequenceStart(
        sequence_id=SequenceId(number),
        lease_id=lease_id or lease(number),
        tokens=np.arange(100, 100 + tokens, dtype="<u4").tobytes(),
        num_computed_tokens=len(shared) // 8 * BLOCK_SIZE if computed is None else computed,
        shared=shared,
        shared_seals=seals,
        owned=owned,
        sampling=GREEDY,
        domain=DomainId(domain),
        copy_from=SequenceId(copy_from),
        copy_source=copy_source,
        copy_seal=copy_seal,
    )


def grow(number: int, *wanted: int) -> Growth:
    return Growth(SequenceId(number), handles(*wanted))


def applied(core: WorkerCore, plan: StepPlan, epoch: SchedulerEpoch = EPOCH) -> Applied:
    outcome = core.apply(epoch, plan)
    assert isinstance(outcome, Applied), outcome
    return outcome


def finish(core: WorkerCore, step: Applied, first_token: int = 900) -> StepResult:
    """The tokens that it samples are `first_token` and those after it."""
    count = 0 if step.batch is None else len(step.batch.sample.rows)
    output = StepOutput(np.arange(first_token, first_token + count, dtype=np.int32))
    core.check()
    following = core.advance(step, output)
    if following is not None:
        return finish(core, following, first_token + count)
    result = core.complete(step, output)
    core.check()
    return result


def run(core: WorkerCore, plan: StepPlan, epoch: SchedulerEpoch = EPOCH, first_token: int = 900) -> StepResult:
    return finish(core, applied(core, plan, epoch), first_token)


def codes(result: StepResult) -> dict[int, str]:
    return {refusal.sequence_id: refusal.code.value for refusal in result.refusals}


def compute(core: WorkerCore, executor: Executor, plan: StepPlan) -> StepResult:
    """Applies, computes and completes a plan, with all of its decode steps."""
    step = applied(core, plan)
    if step.zero.size:
        executor.zero_blocks(step.zero)
    if step.copy_src.size:
        executor.copy_blocks(step.copy_src, step.copy_dst)
    output = NO_OUTPUT if step.batch is None else executor.execute(step.batch)
    while (following := core.advance(step, output)) is not None:
        core.check()
        assert following.batch is not None
        step, output = following, executor.execute(following.batch)
    result = core.complete(step, output)
    core.check()
    return result
