"""Steps in order, results again, rows to batches, refusals that stick."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from coppice.messages.sampling import LIKELY_MAX
from coppice.messages.step import SamplingParams, SequenceStart, StepPlan
from coppice_worker.core.batch.steps import MalformedPlanError, Replayed, StepGap
from tests.fakes.worker.worker_plans import (
    EPOCH,
    applied,
    codes,
    finish,
    grow,
    h,
    handles,
    ready_core,
    run,
    seal,
    settings,
    start,
    u32,
)


def decoding(count: int = 3):
    """A core with `count` sequences that have computed their prompts of 4 and hold one block more."""
    core = ready_core()
    ids = range(1, count + 1)
    attach = tuple(start(n, 4, handles(h(2 * n), h(2 * n + 1))) for n in ids)
    run(core, StepPlan(1, attach=attach, rows=u32(*ids), row_tokens=u32(*[4] * count)))
    return core


def test_steps_are_taken_in_order_and_answered_again():
    core = ready_core()
    assert core.apply(EPOCH, StepPlan(2)) == StepGap(1)
    first = run(core, StepPlan(1, attach=(start(1, 4, handles(h(1))),), rows=u32(1), row_tokens=u32(4)))
    assert core.apply(EPOCH, StepPlan(1)) == Replayed(first)
    assert core.stats().replays == 1
    assert core.apply(EPOCH, StepPlan(3)) == StepGap(2)
    for step in range(2, 30):
        run(core, StepPlan(step))
    assert core.apply(EPOCH, StepPlan(1)) == StepGap(30), "results are kept for a bounded number of steps"
    assert isinstance(core.apply(EPOCH, StepPlan(14)), Replayed)


def test_prefill_in_chunks_then_decode():
    core = ready_core()
    step = applied(core, StepPlan(1, attach=(start(1, 6, handles(h(5), h(2))),), rows=u32(1), row_tokens=u32(3)))
    assert step.batch is not None
    assert step.batch.token_ids.tolist() == [100, 101, 102]
    assert step.batch.slots.tolist() == [20, 21, 22]
    assert len(step.batch.sample.rows) == 0
    assert finish(core, step).sampled_ids == b""
    step = applied(core, StepPlan(2, rows=u32(1), row_tokens=u32(3)))
    assert step.batch is not None
    assert step.batch.positions.tolist() == [3, 4, 5]
    assert step.batch.slots.tolist() == [23, 8, 9]
    assert step.batch.context_lens.tolist() == [6]
    assert step.batch.block_tables[0, :2].tolist() == [5, 2]
    assert not step.batch.block_tables[0, 2:].any()
    assert step.batch.sample.position.tolist() == [6]
    result = finish(core, step, first_token=77)
    assert (result.sampled_ids, result.sampled_tokens, result.num_tokens) == (u32(1), u32(77), 3)
    step = applied(core, StepPlan(3, rows=u32(1), row_tokens=u32(1)))
    assert step.batch is not None
    assert (step.batch.token_ids.tolist(), step.batch.positions.tolist()) == ([77], [6])


def test_mixed_rows_are_packed_in_their_order():
    core = decoding(2)
    plan = StepPlan(2, attach=(start(9, 5, handles(h(10), h(11))),), rows=u32(2, 9, 1), row_tokens=u32(1, 3, 1))
    batch = applied(core, plan).batch
    assert batch is not None
    assert batch.query_starts.tolist() == [0, 1, 4, 5]
    assert batch.token_ids.tolist() == [901, 100, 101, 102, 900]
    assert batch.positions.tolist() == [4, 0, 1, 2, 4]
    assert batch.slots.tolist() == [20, 40, 41, 42, 12]
    assert batch.context_lens.tolist() == [5, 3, 5]
    assert batch.sample.rows.tolist() == [0, 2]
    assert batch.sample.position.tolist() == [5, 5]


def same_batch(left, right) -> bool:
    arrays = ("token_ids", "positions", "slots", "query_starts", "context_lens")
    samples = ("rows", "temperature", "top_k", "top_p", "min_p", "seed", "position")
    width = min(left.block_tables.shape[1], right.block_tables.shape[1])
    wide = [left.block_tables[:, width:], right.block_tables[:, width:]]
    return (
        all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays)
        and all(np.array_equal(getattr(left.sample, name), getattr(right.sample, name)) for name in samples)
        and np.array_equal(left.block_tables[:, :width], right.block_tables[:, :width])
        and not any(part.any() for part in wide)
    )


def test_repeated_rows_give_the_batch_that_named_rows_give():
    repeated, named = decoding(), decoding()
    rows = {"rows": u32(1, 2, 3), "row_tokens": u32(1, 1, 1)}
    for step in range(2, 12):
        growth = (grow(2, h(8 + step // 4, step)),) if step % 4 == 2 else ()
        growth += tuple(grow(n, h(10 + n, step)) for n in (1, 3)) if step == 5 else ()
        left = applied(repeated, StepPlan(step, grow=growth, repeat_rows=True))
        right = applied(named, StepPlan(step, grow=growth, **rows))
        assert left.batch is not None
        assert right.batch is not None
        assert same_batch(left.batch, right.batch)
        results = finish(repeated, left, 10 * step), finish(named, right, 10 * step)
        assert results[0] == results[1]


def test_repeated_rows_see_detached_sequences_and_full_tables():
    core = decoding()
    run(core, StepPlan(2, rows=u32(1, 2, 3), row_tokens=u32(1, 1, 1)))
    assert codes(run(core, StepPlan(3, detach=u32(2), repeat_rows=True))) == {2: "unknown_sequence"}
    run(core, StepPlan(4, rows=u32(1, 3), row_tokens=u32(1, 1)))
    run(core, StepPlan(5, repeat_rows=True))
    assert codes(run(core, StepPlan(6, repeat_rows=True))) == {1: "not_reserved", 3: "not_reserved"}


def test_repeated_rows_see_a_seal_over_the_block_being_written():
    core = decoding(1)
    run(core, StepPlan(2, rows=u32(1), row_tokens=u32(1)))
    plan = StepPlan(3, sealed=handles(h(3)), seals=seal(4), repeat_rows=True)
    assert codes(run(core, plan)) == {1: "not_reserved"}


def test_step_writes_nothing_outside_its_own_blocks():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(1))),), rows=u32(1), row_tokens=u32(4)))
    run(core, StepPlan(2, sealed=handles(h(1)), seals=seal(9)))
    whole = start(2, 4, b"", handles(h(1)), seal(9), computed=4)
    none_left = applied(core, StepPlan(3, attach=(whole,), rows=u32(2), row_tokens=u32(1)))
    assert none_left.batch is None
    assert codes(finish(core, none_left)) == {2: "not_reserved"}
    assert codes(run(core, StepPlan(4, rows=u32(1), row_tokens=u32(1)))) == {1: "not_reserved"}


def test_step_over_the_token_budget_refuses_the_rows_beyond_it():
    core = ready_core(settings(max_step_tokens=5))
    attach = (start(1, 4, handles(h(1))), start(2, 4, handles(h(2))))
    result = run(core, StepPlan(1, attach=attach, rows=u32(1, 2), row_tokens=u32(4, 4)))
    assert codes(result) == {2: "not_reserved"}
    assert result.num_tokens == 4


def test_refusal_sticks_until_the_sequence_is_detached():
    core = decoding(2)
    bad = StepPlan(2, grow=(grow(1, h(9, 0)),), rows=u32(1, 2), row_tokens=u32(1, 1))
    result = run(core, bad)
    assert codes(result) == {1: "stale"}
    assert result.sampled_ids == u32(2)
    assert codes(run(core, StepPlan(3, repeat_rows=True))) == {1: "stale"}
    assert codes(run(core, StepPlan(4, grow=(grow(1, h(9)),)))) == {1: "stale"}
    assert core.pool.generation[9] == 0
    plan = StepPlan(5, detach=u32(1), attach=(start(1, 4, handles(h(9))),), rows=u32(1), row_tokens=u32(4))
    assert codes(run(core, plan)) == {}


def test_refused_attach_is_skipped_by_the_plan_that_is_on_its_way():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(1, 0))),), rows=u32(1), row_tokens=u32(2)))
    result = run(core, StepPlan(2, rows=u32(1), row_tokens=u32(2)))
    assert codes(result) == {1: "stale"}
    assert result.num_tokens == 0


def reporting(**numbers: int) -> SequenceStart:
    return replace(start(8, 4, handles(h(9))), sampling=SamplingParams(**numbers))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (StepPlan(2, detach=b"abc"), "detach"),
        (StepPlan(2, sealed=handles(h(1)), seals=b"x"), "seals"),
        (StepPlan(2, rows=u32(1)), "row_tokens"),
        (StepPlan(2, rows=u32(1, 1), row_tokens=u32(1, 1)), "twice"),
        (StepPlan(2, rows=u32(1), row_tokens=u32(0)), "no token"),
        (StepPlan(2, rows=u32(1), row_tokens=u32(1), repeat_rows=True), "repeat_rows"),
        (StepPlan(2, attach=(start(1, 4, handles(h(9))),)), "attached already"),
        (StepPlan(2, attach=(start(8), start(8))), "stands twice"),
        (StepPlan(2, attach=(start(8, 0),)), "tokens"),
        (StepPlan(2, attach=(start(8, 4, handles(h(9)), computed=1),)), "without KV"),
        (StepPlan(2, attach=(start(8, 4, handles(h(9)), copy_from=1),)), "a copy of nothing"),
        (StepPlan(2, attach=(start(8, 6, handles(h(9)), computed=5, copy_from=1),)), "has no block"),
        (StepPlan(2, attach=(start(8, 4, b"", handles(h(9)), b""),)), "seals are cut"),
        (StepPlan(2, attach=(start(8, 4, b"", b"", b"", computed=-1),)), "out of range"),
        (StepPlan(2, attach=(reporting(num_logprobs=LIKELY_MAX + 1),)), "impossible num_logprobs;"),
        (StepPlan(2, attach=(reporting(num_prompt_logprobs=LIKELY_MAX + 1),)), "impossible num_prompt_logprobs;"),
    ],
)
def test_malformed_plan_changes_nothing(plan: StepPlan, problem: str):
    core = decoding()
    with pytest.raises(MalformedPlanError, match=problem):
        core.apply(EPOCH, plan)
    core.check()
    assert codes(run(core, StepPlan(2, rows=u32(1, 2, 3), row_tokens=u32(1, 1, 1)))) == {}


def test_sequences_that_are_never_detached_are_limited():
    core = ready_core(settings(max_sequences=1))
    for step in range(1, 6):
        run(core, StepPlan(step, attach=(start(step, 4, handles(h(1, 0))),)))
    with pytest.raises(MalformedPlanError, match="never detached"):
        core.apply(EPOCH, StepPlan(6))
    run(core, StepPlan(6, detach=u32(1, 2, 3)))


def test_sampling_parameters_reach_the_rows():
    core = ready_core()
    base = start(1, 4, handles(h(1)))
    sampling = type(base.sampling)(temperature=0.5, top_k=3, top_p=0.25, seed=(1 << 64) - 1)
    chosen = SequenceStart(
        base.sequence_id, base.lease_id, base.tokens, 0, base.shared, base.shared_seals, base.owned, sampling
    )
    batch = applied(core, StepPlan(1, attach=(chosen,), rows=u32(1), row_tokens=u32(4))).batch
    assert batch is not None
    assert batch.sample.temperature.tolist() == [0.5]
    assert batch.sample.top_k.tolist() == [3]
    assert batch.sample.top_p.tolist() == [0.25]
    assert batch.sample.seed.tolist() == [(1 << 64) - 1]


def test_last_token_of_a_full_context_is_sampled_and_kept():
    core = ready_core(settings(max_context=8))
    result = run(
        core, StepPlan(1, attach=(start(1, 8, handles(h(1), h(2))),), rows=u32(1), row_tokens=u32(8)), first_token=5
    )
    assert result.sampled_tokens == u32(5)
    assert codes(run(core, StepPlan(2, repeat_rows=True))) == {1: "not_reserved"}
