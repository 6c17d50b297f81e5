"""A fork copies from a sequence of its own domain with its own tokens, or not at all (I19)."""

from __future__ import annotations

from msgspec.structs import replace

from coppice.messages.registration import Fence
from coppice.messages.step import SequenceStart, StepPlan
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import applied, codes, finish, grow, h, handles, lease, ready_core, run, start, u32

SOURCE, FORK = 1, 2


def with_source(domain: str = "d") -> WorkerCore:
    """Sequence 1 has computed six tokens, in the blocks 3 and 4; four fill a block."""
    core = ready_core()
    plan = StepPlan(
        1, attach=(start(SOURCE, 6, handles(h(3), h(4)), domain=domain),), rows=u32(SOURCE), row_tokens=u32(6)
    )
    assert codes(run(core, plan)) == {}
    return core


def fork(computed: int = 5, domain: str = "d", copy_from: int = SOURCE, owned: bytes = b"") -> SequenceStart:
    owned = owned or handles(h(5), h(6))
    return start(FORK, 6, owned, computed=computed, copy_from=copy_from, domain=domain)


def attach(begun: SequenceStart, **more: object) -> StepPlan:
    return StepPlan(2, attach=(begun,), rows=u32(FORK), row_tokens=u32(1), **more)  # type: ignore[arg-type]


def refused(core: WorkerCore, plan: StepPlan) -> dict[int, str]:
    """What was refused; nothing of the fork was touched."""
    step = applied(core, plan)
    assert (len(step.copy_src), len(step.copy_dst)) == (0, 0)
    found = codes(finish(core, step))
    assert FORK not in core.sequences.slot_of
    return found


def test_blocks_of_the_source_are_copied_as_far_as_the_fork_has_tokens():
    core = with_source()
    step = applied(core, attach(fork()))
    assert (step.copy_src.tolist(), step.copy_dst.tolist()) == ([3, 4], [5, 6])
    assert codes(finish(core, step)) == {}


def test_a_copied_block_is_not_zeroed():
    core = with_source()
    step = applied(core, attach(fork(owned=handles(h(5), h(6), h(7))), zero=handles(h(5), h(6), h(7))))
    assert (step.copy_dst.tolist(), step.zero.tolist()) == ([5, 6], [7])


def test_a_source_with_other_tokens_is_refused():
    """The last token differs that is copied; the whole blocks before it are the same."""
    core = with_source()
    tokens = u32(100, 101, 102, 103, 999, 105)
    assert refused(core, attach(replace(fork(), tokens=tokens))) == {FORK: "lost_source"}


def test_tokens_after_what_is_copied_may_differ():
    core = with_source()
    tokens = u32(100, 101, 102, 103, 104, 999)
    assert codes(run(core, attach(replace(fork(), tokens=tokens)))) == {}


def test_a_source_of_another_domain_is_refused():
    assert refused(with_source(), attach(fork(domain="e"))) == {FORK: "lost_source"}


def test_a_source_that_has_not_computed_so_much_is_refused():
    core = ready_core()
    half = StepPlan(1, attach=(start(SOURCE, 6, handles(h(3), h(4)), domain="d"),), rows=u32(SOURCE), row_tokens=u32(4))
    run(core, half)
    assert refused(core, attach(fork())) == {FORK: "lost_source"}


def test_a_source_that_is_not_there_is_refused():
    assert refused(with_source(), attach(fork(copy_from=9))) == {FORK: "lost_source"}
    assert refused(with_source(), attach(fork(copy_from=FORK))) == {FORK: "lost_source"}


def test_a_source_that_was_fenced_is_refused():
    core = with_source()
    core.fence(Fence(1, core.worker_epoch, lease_ids=(lease(SOURCE),)))
    assert refused(core, attach(fork())) == {FORK: "lost_source"}


def test_a_source_that_the_same_plan_detaches_is_copied():
    core = with_source()
    step = applied(core, attach(fork(), detach=u32(SOURCE)))
    assert step.copy_src.tolist() == [3, 4]
    assert codes(finish(core, step)) == {}


def test_a_source_whose_block_the_same_plan_opens_anew_is_refused():
    core = with_source()
    thief = start(3, 4, handles(h(4, 2)))
    plan = StepPlan(2, detach=u32(SOURCE), attach=(thief, fork()), rows=u32(3, FORK), row_tokens=u32(4, 1))
    assert refused(core, plan) == {FORK: "lost_source"}
    core = with_source()
    run(core, StepPlan(2, attach=(start(3, 4, handles(h(7))),)))
    grown = StepPlan(
        3, detach=u32(SOURCE), attach=(fork(),), grow=(grow(3, h(4, 2)),), rows=u32(FORK), row_tokens=u32(1)
    )
    assert refused(core, grown) == {FORK: "lost_source"}


def test_a_sequence_of_a_session_before_is_no_source():
    core = with_source()
    core.attach_scheduler(core.planning)  # type: ignore[arg-type]
    assert refused(core, replace(attach(fork()), step=1)) == {FORK: "lost_source"}
