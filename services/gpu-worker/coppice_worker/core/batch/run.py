"""The passes of one plan, on an executor.

    a pass at a time    | pass 1 |  tokens, next batch  | pass 2 |  tokens, next batch  | pass 3 |
    ahead               | pass 1 || pass 2 || pass 3 |
                          next batch,  tokens of pass 1 ...         meanwhile

An executor that runs ahead keeps the sampled tokens where they are needed next, so the device need not wait until the
host has heard of them.
"""

from __future__ import annotations

from typing import Protocol

from coppice_worker.core.batch.step_batch import NO_OUTPUT, AheadExecutor, Executor, StepBatch, StepOutput
from coppice_worker.core.batch.steps import Applied


class Passes(Protocol):
    """The part of a worker core that knows what comes after a pass; see there."""

    def advance(self, applied: Applied, output: StepOutput) -> Applied | None: ...

    def ahead(self, applied: Applied) -> StepBatch | None: ...


def run(core: Passes, executor: Executor, applied: Applied) -> tuple[Applied, StepOutput]:
    """The last pass and what it gave: `complete` it."""
    prepare_blocks(executor, applied)
    if applied.batch is None:
        return applied, NO_OUTPUT
    if applied.num_steps_left > 1 and isinstance(executor, AheadExecutor) and executor.runs_ahead(applied.batch):
        return _run_ahead(core, executor, applied)
    output = executor.execute(applied.batch)
    while (following := core.advance(applied, output)) is not None:
        assert following.batch is not None
        applied, output = following, executor.execute(following.batch)
    return applied, output


def prepare_blocks(executor: Executor, applied: Applied) -> None:
    """What a plan's new blocks need before its first pass: zeros (I15), then copies for forks (I19)."""
    if applied.zero.size:
        executor.zero_blocks(applied.zero)
    if applied.copy_src.size:
        executor.copy_blocks(applied.copy_src, applied.copy_dst)


def _run_ahead(core: Passes, executor: AheadExecutor, applied: Applied) -> tuple[Applied, StepOutput]:
    assert applied.batch is not None
    pending = executor.launch(applied.batch)
    while (ahead := core.ahead(applied)) is not None:
        following = executor.launch(ahead)
        advanced = core.advance(applied, pending.wait())
        assert advanced is not None, "nothing ends a plan between its passes"
        pending, applied = following, advanced
    return applied, pending.wait()
