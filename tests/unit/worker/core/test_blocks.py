"""The worker's check of every handle (DESIGN sections 5 and 6a), asked directly."""

from __future__ import annotations

import pytest

from coppice.messages.step import StepPlan
from tests.fakes.worker.worker_plans import (
    applied,
    codes,
    finish,
    grow,
    h,
    handles,
    lease,
    ready_core,
    run,
    seal,
    settings,
    start,
    u32,
)


def opened_and_sealed(generation: int = 5):
    """A core whose block 3 is full, sealed and without users."""
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3, generation))),), rows=u32(1), row_tokens=u32(4)))
    run(core, StepPlan(2, sealed=handles(h(3, generation)), seals=seal(9), detach=u32(1)))
    return core


def test_shared_block_is_read_under_equal_generation_and_seal():
    core = opened_and_sealed()
    plan = StepPlan(3, attach=(start(2, 6, handles(h(4)), handles(h(3, 5)), seal(9)),), rows=u32(2), row_tokens=u32(2))
    assert codes(run(core, plan)) == {}
    assert core.pool.readers[3] == 1
    assert core.pool.writer[4] == core.sequences.slot_of[2] + 1


@pytest.mark.parametrize(
    ("generation", "claimed", "code"),
    [(4, 9, "stale"), (6, 9, "stale"), (5, 8, "wrong_seal"), (5, 0, "wrong_seal"), (0, 9, "stale")],
)
def test_shared_block_is_refused_otherwise(generation: int, claimed: int, code: str):
    core = opened_and_sealed()
    shared = handles(h(3, generation))
    plan = StepPlan(3, attach=(start(2, 6, handles(h(4)), shared, seal(claimed)),), rows=u32(2), row_tokens=u32(2))
    result = run(core, plan)
    assert codes(result) == {2: code}
    assert result.refusals[0].handle == h(3, generation)
    assert core.pool.readers[3] == 0
    assert core.pool.generation[4] == 0, "nothing of a refused sequence is touched"


def test_unsealed_block_is_not_read_even_with_a_seal_of_zeros():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3))),), rows=u32(1), row_tokens=u32(4)))
    plan = StepPlan(2, attach=(start(2, 6, handles(h(4)), handles(h(3)), seal(0)),))
    assert codes(run(core, plan)) == {2: "wrong_seal"}


def test_only_an_owned_handle_opens_an_occupancy():
    core = opened_and_sealed(generation=5)
    assert codes(run(core, StepPlan(3, attach=(start(2, 6, b"", handles(h(3, 6)), seal(9)),)))) == {2: "stale"}
    assert core.pool.generation[3] == 5
    assert codes(run(core, StepPlan(4, attach=(start(3, 4, handles(h(3, 6))),)))) == {}
    assert core.pool.generation[3] == 6
    assert not core.pool.seal[3].any()


@pytest.mark.parametrize(("generation", "code"), [(4, "stale"), (5, "double_grant"), (6, "double_grant"), (0, "stale")])
def test_block_with_a_live_writer_is_not_opened(generation: int, code: str):
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3, 5))),)))
    assert codes(run(core, StepPlan(2, attach=(start(2, 4, handles(h(3, generation))),)))) == {2: code}


def test_block_with_a_live_reader_is_not_opened():
    core = opened_and_sealed()
    run(core, StepPlan(3, attach=(start(2, 6, handles(h(4)), handles(h(3, 5)), seal(9)),)))
    assert codes(run(core, StepPlan(4, attach=(start(3, 4, handles(h(3, 6))),)))) == {3: "double_grant"}


@pytest.mark.parametrize(("number", "expected"), [(1, {}), (2, {2: "double_grant"})])
def test_equal_generation_opens_for_the_same_lease_only(number: int, expected: dict[int, str]):
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3, 5))),)))
    run(core, StepPlan(2, detach=u32(1)))
    plan = StepPlan(3, attach=(start(number, 4, handles(h(3, 5)), lease_id=lease(number)),))
    assert codes(run(core, plan)) == expected


def test_sealed_block_is_not_opened_by_its_own_lease():
    core = opened_and_sealed()
    assert codes(run(core, StepPlan(3, attach=(start(1, 4, handles(h(3, 5))),)))) == {1: "double_grant"}


def test_block_id_outside_the_pool_is_stale():
    core = ready_core()
    assert codes(run(core, StepPlan(1, attach=(start(1, 4, handles(h(16))),)))) == {1: "stale"}


def test_block_stands_once_in_a_table_and_in_a_plan():
    core = ready_core()
    twice = StepPlan(
        1, attach=(start(1, 8, handles(h(3), h(3))), start(2, 4, handles(h(4))), start(3, 4, handles(h(4))))
    )
    assert codes(run(core, twice)) == {1: "double_grant", 3: "double_grant"}


def test_sealed_block_is_not_written_by_its_writer():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3))),), rows=u32(1), row_tokens=u32(2)))
    assert codes(run(core, StepPlan(2, sealed=handles(h(3)), seals=seal(9)))) == {}
    assert codes(run(core, StepPlan(3, rows=u32(1), row_tokens=u32(2)))) == {1: "not_reserved"}
    run(core, StepPlan(4, detach=u32(1)))
    assert core.pool.readers[3] == 0


def test_seals_of_another_occupancy_or_over_another_seal_change_nothing():
    core = opened_and_sealed(generation=5)
    late = handles(h(3, 4), h(3, 6), h(3, 5), h(4, 1))
    run(core, StepPlan(3, sealed=late, seals=seal(1) + seal(2) + seal(3) + seal(4)))
    assert core.pool.packed()[1][3 * 16 : 4 * 16] == seal(9)
    assert core.stats().ignored_seals == 4
    run(core, StepPlan(4, sealed=handles(h(3, 5)), seals=seal(9)))
    assert core.stats().ignored_seals == 4, "the same seal again is no surprise"


def test_growth_follows_the_rules_of_attaching():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(1))), start(2, 4, handles(h(2))), start(3, 4, handles(h(3))))))
    plan = StepPlan(2, grow=(grow(1, h(4)), grow(2, h(1, 2)), grow(3, h(4, 2)), grow(9, h(5))))
    assert codes(run(core, plan)) == {2: "double_grant", 3: "double_grant", 9: "unknown_sequence"}
    assert core.sequences.num_blocks[core.sequences.slot_of[1]] == 2
    assert core.pool.generation[5] == 0


def test_growth_of_many_sequences_at_once():
    core = ready_core()
    run(core, StepPlan(1, attach=tuple(start(n, 4, handles(h(n))) for n in (1, 2, 3))))
    assert codes(run(core, StepPlan(2, grow=(grow(1, h(4), h(5)), grow(2, h(6)), grow(3, h(7)))))) == {}
    assert [core.sequences.blocks(core.sequences.slot_of[n]).tolist() for n in (1, 2, 3)] == [[1, 4, 5], [2, 6], [3, 7]]
    again = StepPlan(3, grow=(grow(1, h(8)), grow(1, h(9))))
    assert codes(run(core, again)) == {}
    assert core.sequences.blocks(core.sequences.slot_of[1]).tolist() == [1, 4, 5, 8, 9]


def test_limits_refuse_one_sequence():
    core = ready_core(settings(max_sequences=2, max_context=8))
    plan = StepPlan(1, attach=(start(1, 9, handles(h(1))), start(2, 4, handles(h(2), h(3), h(4)))))
    assert codes(run(core, plan)) == {1: "not_reserved", 2: "not_reserved"}
    run(core, StepPlan(2, attach=(start(3, 4, handles(h(1))), start(4, 4, handles(h(2))), start(5, 4, handles(h(3))))))
    assert sorted(core.sequences.slot_of) == [3, 4]
    assert codes(run(core, StepPlan(3, grow=(grow(3, h(5), h(6)),)))) == {3: "not_reserved"}


def test_zeroing_happens_only_in_blocks_that_the_plan_opened():
    core = opened_and_sealed()
    plan = StepPlan(
        3,
        attach=(start(2, 6, handles(h(4), h(5))), start(3, 6, handles(h(3, 4)))),
        zero=handles(h(5), h(3, 4), h(9)),
    )
    step = applied(core, plan)
    assert step.zero.tolist() == [5], "3 was refused, 9 belongs to nobody"
    assert codes(finish(core, step)) == {3: "stale"}


def test_detach_and_attach_of_the_same_block_in_one_plan():
    core = ready_core()
    run(core, StepPlan(1, attach=(start(1, 4, handles(h(3))),)))
    assert codes(run(core, StepPlan(2, detach=u32(1), attach=(start(2, 4, handles(h(3, 2))),)))) == {}


def test_check_sees_a_lost_reader():
    core = opened_and_sealed()
    run(core, StepPlan(3, attach=(start(2, 6, handles(h(4)), handles(h(3, 5)), seal(9)),)))
    core.pool.readers[3] = 0
    with pytest.raises(AssertionError, match="readers"):
        core.check()
