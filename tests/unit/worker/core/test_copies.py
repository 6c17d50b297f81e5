"""Copies between the tiers as the worker core sees them: what may start, who uses which block, what is said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import (
    NOTHING_LOST,
    CopiesDone,
    CopyOrder,
    CopyOrders,
    Direction,
    Fence,
    FenceAck,
    Registered,
)
from coppice.messages.step import StepPlan
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.core.blocks.copies import CopyWork
from coppice_worker.core.blocks.pool import COPIER
from coppice_worker.core.worker import WorkerCore
from tests.fakes.worker.worker_plans import EPOCH, codes, h, handles, ready_core, run, seal, start, u32
from tests.fakes.worker.worker_plans import settings as core_settings

NOW = WorkerEpoch(1)
DEMOTE, PROMOTE = Direction.DEMOTE, Direction.PROMOTE


def with_host(num_host_blocks: int = 8, **changes: int) -> WorkerCoreSettings:
    chosen = core_settings()
    names = {name: getattr(chosen, name) for name in chosen.__slots__}
    return WorkerCoreSettings(**{**names, "num_host_blocks": num_host_blocks, **changes})


def cached_core(**changes: int) -> WorkerCore:
    """Blocks 2 and 3 of the device are full, sealed 2 and 3 under generation 5, and without users."""
    core = ready_core(with_host(**changes))
    owned = handles(h(2, 5), h(3, 5))
    run(core, StepPlan(1, attach=(start(1, 8, owned),), rows=u32(1), row_tokens=u32(8)))
    run(core, StepPlan(2, sealed=owned, seals=seal(2) + seal(3), detach=u32(1)))
    return core


def order(number: int, direction: Direction, src: bytes, dst: bytes, seals: bytes) -> CopyOrder:
    return CopyOrder(number, direction, src, dst, seals)


def give(core: WorkerCore, *orders: CopyOrder, epoch: int = NOW) -> tuple[tuple[CopyWork, ...], CopiesDone | None]:
    ordered = core.order_copies(CopyOrders(WorkerEpoch(epoch), orders))
    core.check()
    return ordered.works, ordered.answer


def demotion(number: int = 1, generation: int = 9) -> CopyOrder:
    src = handles(h(2, 5), h(3, 5))
    return order(number, DEMOTE, src, handles(h(0, generation), h(7, generation)), seal(2) + seal(3))


def promotion(number: int = 2, block: int = 4, generation: int = 6) -> CopyOrder:
    return order(number, PROMOTE, handles(h(7, 9)), handles(h(block, generation)), seal(3))


def demoted_core() -> WorkerCore:
    core = cached_core()
    (work,), _ = give(core, demotion())
    assert core.copied((work.number,)) == (CopiesDone(NOW, (1,)), ())
    return core


def test_a_demotion_is_done_when_it_is_copied_and_not_before() -> None:
    core = cached_core()
    (work,), answer = give(core, demotion())
    assert (work.direction, work.src.tolist(), work.dst.tolist(), answer) == (DEMOTE, [2, 3], [0, 7], None)
    assert not core.host_pool.seal.any()
    assert core.copied((work.number,)) == (CopiesDone(NOW, (1,)), ())
    core.check()
    assert core.host_pool.packed()[1][7 * 16 :] == seal(3)
    assert not core.pool.has_user().any()
    assert not core.host_pool.has_user().any()


def test_what_is_promoted_can_be_attached_when_it_is_copied() -> None:
    core = demoted_core()
    (work,), _ = give(core, promotion())
    reader = start(9, 6, handles(h(5)), handles(h(4, 6)), seal(3))
    assert codes(run(core, StepPlan(3, attach=(reader,)))) == {9: "wrong_seal"}, "it is not whole yet"
    run(core, StepPlan(4, detach=u32(9)))
    assert core.copied((work.number,)) == (CopiesDone(NOW, (2,)), ())
    assert codes(run(core, StepPlan(5, attach=(reader,)))) == {}


def changed(**changes: object) -> CopyOrder:
    base = demotion(number=11)
    values = {name: getattr(base, name) for name in base.__slots__}
    return CopyOrder(**{**values, **changes})  # type: ignore[arg-type]


REFUSED = {
    "an older generation of a source": changed(src=handles(h(2, 4), h(3, 5))),
    "a newer generation of a source": changed(src=handles(h(2, 5), h(3, 6))),
    "another seal": changed(seals=seal(2) + seal(4)),
    "no seal": changed(seals=seal(2) + seal(0)),
    "a source outside the pool": changed(src=handles(h(2, 5), h(16, 5))),
    "a target outside the pool": changed(dst=handles(h(0, 9), h(8, 9))),
    "a target twice": changed(dst=handles(h(0, 9), h(0, 9))),
    "a target of no generation": changed(dst=handles(h(0, 9), h(1, 0))),
    "an older generation of a target": changed(dst=handles(h(0, 9), h(6, 7))),
    "a target that is used already": changed(dst=handles(h(0, 9), h(6, 8))),
    "fewer targets": changed(dst=handles(h(0, 9))),
    "fewer seals": changed(seals=seal(2)),
    "half a handle": changed(src=handles(h(2, 5), h(3, 5))[:-1]),
    "half a seal": changed(seals=(seal(2) + seal(3))[:-1]),
    "nothing": changed(src=b"", dst=b"", seals=b""),
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_a_wrong_order_fails_and_touches_nothing(wrong: CopyOrder) -> None:
    core = cached_core()
    (work,), _ = give(core, order(1, DEMOTE, handles(h(2, 5)), handles(h(6, 8)), seal(2)))
    core.copied((work.number,))
    before = core.pool.packed(), core.host_pool.packed()
    assert give(core, wrong) == ((), CopiesDone(NOW, (), (11,)))
    assert (core.pool.packed(), core.host_pool.packed()) == before


@pytest.mark.parametrize("used_by", ["a writer", "a reader", "a copy that reads", "a copy that writes"])
def test_a_target_with_a_user_is_not_overwritten(used_by: str) -> None:
    core = demoted_core()
    if used_by == "a writer":
        run(core, StepPlan(3, attach=(start(5, 4, handles(h(4, 5))),), rows=u32(5), row_tokens=u32(1)))
    elif used_by == "a reader":
        run(core, StepPlan(3, attach=(start(5, 6, handles(h(8)), handles(h(2, 5)), seal(2)),)))
    elif used_by == "a copy that reads":
        give(core, order(5, DEMOTE, handles(h(2, 5)), handles(h(1, 9)), seal(2)))
    else:
        give(core, promotion(number=5, block=4, generation=6))
    block = 2 if used_by in ("a reader", "a copy that reads") else 4
    assert give(core, promotion(block=block, generation=7)) == ((), CopiesDone(NOW, (), (2,)))


@pytest.mark.parametrize("make", [demotion, lambda: promotion(block=2, generation=5)], ids=["demotion", "promotion"])
def test_no_plan_opens_what_a_copy_uses(make: Callable[[], CopyOrder]) -> None:
    core = demoted_core()
    wanted = demotion(number=3, generation=10) if make is demotion else promotion(block=3, generation=6)
    (work,), _ = give(core, wanted)
    plan = StepPlan(3, attach=(start(5, 4, handles(h(3, 8))),))
    assert codes(run(core, plan)) == {5: "double_grant"}
    core.copied((work.number,))
    assert codes(run(core, StepPlan(4, detach=u32(5), attach=(start(6, 4, handles(h(3, 8))),)))) == {}


def test_a_block_whose_seal_is_on_its_way_is_demoted() -> None:
    """The cache service publishes, and orders before the next plan has brought the seal."""
    core = ready_core(with_host())
    run(core, StepPlan(1, attach=(start(1, 6, handles(h(3, 5), h(4, 5))),), rows=u32(1), row_tokens=u32(5)))
    (work,), answer = give(core, order(1, DEMOTE, handles(h(3, 5)), handles(h(0, 9)), seal(3)))
    assert answer is None
    assert core.pool.writer[3] == 0, "nobody writes there any more"
    run(core, StepPlan(2, sealed=handles(h(3, 5)), seals=seal(3), rows=u32(1), row_tokens=u32(1)))
    run(core, StepPlan(3, detach=u32(1)))
    assert core.copied((work.number,))[0] == CopiesDone(NOW, (1,))
    core.check()
    assert not core.pool.has_user().any()


def test_an_order_that_is_repeated_is_answered_again_and_copied_once() -> None:
    core = cached_core()
    (work,), _ = give(core, demotion())
    assert give(core, demotion()) == ((), None), "under way"
    core.copied((work.number,))
    run(core, StepPlan(3, attach=(start(5, 4, handles(h(2, 6))),)))
    assert give(core, demotion()) == ((), CopiesDone(NOW, (1,))), "done, though the source is somebody else's now"


def test_answers_of_one_message_come_together() -> None:
    core = cached_core()
    stale = order(3, DEMOTE, handles(h(2, 4)), handles(h(1, 9)), seal(2))
    works, answer = give(core, stale, demotion(1), order(4, DEMOTE, handles(h(2, 5)), handles(h(2, 9)), seal(2)))
    assert answer == CopiesDone(NOW, (), (3,))
    assert core.copied(tuple(work.number for work in works)) == (CopiesDone(NOW, (1, 4)), ())


def test_an_order_of_another_worker_epoch_fails_under_that_epoch() -> None:
    core = cached_core()
    assert give(core, demotion(), epoch=2) == ((), CopiesDone(WorkerEpoch(2), (), (1,), lost_from=(NOTHING_LOST,)))


def test_without_a_host_tier_every_order_fails() -> None:
    core = cached_core(num_host_blocks=0)
    assert give(core, demotion()) == ((), CopiesDone(NOW, (), (1,)))
    assert core.registration().num_host_blocks == 0


def test_orders_and_answers_are_bounded() -> None:
    core = cached_core(max_copy_orders=2)
    orders = [order(n, DEMOTE, handles(h(2, 5)), handles(h(n, 9)), seal(2)) for n in range(3)]
    works, answer = give(core, *orders)
    assert len(works) == 2
    assert answer == CopiesDone(NOW, (), (2,))
    core.copied(tuple(work.number for work in works))
    refused = [order(100 + n, DEMOTE, handles(h(2, 4)), handles(h(5, 9)), seal(2)) for n in range(10)]
    for wrong in refused:
        give(core, wrong)
    assert give(core, *orders[:2])[0] == (), "forgotten, but not opened twice"


def test_a_takeover_leaves_copies_their_blocks() -> None:
    core = demoted_core()
    read, write = (
        order(5, DEMOTE, handles(h(2, 5)), handles(h(1, 9)), seal(2)),
        promotion(number=6, block=4, generation=6),
    )
    works, _ = give(core, read, write)
    core.attach_scheduler(SchedulerEpoch(8))
    core.check()
    assert core.pool.readers[2] == 1
    assert core.pool.writer[4] == COPIER
    core.copied(tuple(work.number for work in works))
    core.check()
    assert not core.pool.has_user().any()


def test_a_fence_is_acknowledged_when_the_copies_before_it_are_over() -> None:
    core = cached_core()
    first, second = (order(n, DEMOTE, handles(h(2, 5)), handles(h(n, 9)), seal(2)) for n in (1, 2))
    works, _ = give(core, first, second)
    assert core.fence(Fence(4, NOW, scheduler_epochs=(EPOCH,), report=True)) is None
    assert core.planning is None, "it has effect at once"
    (later,), _ = give(core, order(3, DEMOTE, handles(h(2, 5)), handles(h(3, 9)), seal(2)))
    assert core.copied((works[1].number,)) == (CopiesDone(NOW, (2,)), ())
    answer, (ack,) = core.copied((works[0].number,))
    assert answer == CopiesDone(NOW, (1,))
    assert ack == FenceAck(4, NOW, *core.pool.packed(), *core.host_pool.packed())
    assert np.frombuffer(ack.host_generations, "<u8")[1] == 9
    assert core.copied((later.number,)) == (CopiesDone(NOW, (3,)), ())


def test_a_fence_of_an_earlier_session_is_not_acknowledged() -> None:
    core = cached_core()
    (work,), _ = give(core, demotion())
    assert core.fence(Fence(4, NOW)) is None
    core.registration()
    assert core.copied((work.number,)) == (CopiesDone(NOW, (1,)), ())


def test_a_new_cache_epoch_hears_nothing_of_the_orders_of_the_old_one() -> None:
    core = cached_core()
    (work,), _ = give(core, demotion())
    assert not core.registered(Registered(NOW, CacheEpoch(2)))
    message = core.registration()
    assert np.frombuffer(message.host_generations, "<u8")[7] == 9
    fence = Fence(1, NOW, report=True)
    assert core.fence(fence) is None
    answer, acks = core.copied((work.number,))
    assert answer is None, "order 1 of the new epoch is another one"
    assert [ack.fence_id for ack in acks] == [1]
    (again,), _ = give(core, order(1, DEMOTE, handles(h(2, 5)), handles(h(1, 20)), seal(2)))
    assert again.number != work.number


def test_a_new_worker_epoch_forgets_the_host_tier() -> None:
    core = demoted_core()
    (late,), _ = give(core, order(3, DEMOTE, handles(h(2, 5)), handles(h(1, 9)), seal(2)))
    assert core.fence(Fence(4, NOW)) is None
    assert core.registered(Registered(WorkerEpoch(2), CacheEpoch(1)))
    message = core.registration()
    assert (message.host_generations, message.host_seals) == (bytes(64), bytes(128))
    assert core.copied((late.number,)) == (None, ())
    assert give(core, promotion(), epoch=2) == ((), CopiesDone(WorkerEpoch(2), (), (2,)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("demote"), st.integers(0, 15), st.integers(0, 7), st.integers(-1, 1)),
        st.tuples(st.just("promote"), st.integers(0, 7), st.integers(0, 15), st.integers(-1, 1)),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("fill"), st.integers(0, 15), st.booleans()),
        st.tuples(
            st.just("fence"),
        ),
        st.tuples(
            st.just("takeover"),
        ),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_is_ordered_each_seal_stays_with_its_content(steps: list[tuple[object, ...]]) -> None:
    """A block has a number; a copy moves it at its end. A sealed block always has the number of its seal."""
    core = ready_core(with_host())
    content = {DEMOTE: [0] * 16, PROMOTE: [0] * 8}  # of the tier that is read
    pools = {DEMOTE: core.pool, PROMOTE: core.host_pool}
    under_way: list[CopyWork] = []
    counters = {"order": 0, "step": 0, "number": 0, "fence": 0, "epoch": int(EPOCH)}
    waiting: list[tuple[int, set[int]]] = []

    def bump(name: str) -> int:
        counters[name] += 1
        return counters[name]

    for step in steps:
        match step:
            case "demote" | "promote" as name, int(src), int(dst), int(above):
                direction = Direction(name)
                source, target = pools[direction], pools[DEMOTE if direction is PROMOTE else PROMOTE]
                claimed = source.packed()[1][16 * src : 16 * src + 16]
                generation = int(target.generation[dst]) + above
                busy = bool(target.has_user()[dst])
                expected = any(claimed) and above == 1 and not busy
                wanted = order(
                    bump("order"),
                    direction,
                    handles(h(src, int(source.generation[src]))),
                    handles(h(dst, max(0, generation))),
                    claimed,
                )
                works, _ = give(core, wanted)
                assert bool(works) == expected
                under_way += works
            case "finish", int(which) if under_way:
                work = under_way.pop(which % len(under_way))
                target_tier = DEMOTE if work.direction is PROMOTE else PROMOTE
                content[target_tier][work.dst[0]] = content[work.direction][work.src[0]]
                answer, acks = core.copied((work.number,))
                assert answer is not None
                for _, left in waiting:
                    left.discard(work.number)
                assert [ack.fence_id for ack in acks] == [number for number, left in waiting if not left]
                waiting = [(number, left) for number, left in waiting if left]
            case "fill", int(block), bool(sealed):
                number, planner = bump("number"), SchedulerEpoch(counters["epoch"])
                owned = handles(h(block, int(core.pool.generation[block]) + 1))
                plan = StepPlan(bump("step"), attach=(start(number, 4, owned),), rows=u32(number), row_tokens=u32(4))
                is_used = bool(core.pool.has_user()[block])
                refused = bool(codes(run(core, plan, planner)))
                assert refused == is_used
                if not refused:
                    content[DEMOTE][block] = number
                named, its_seal = (owned, seal(number)) if sealed and not refused else (b"", b"")
                run(core, StepPlan(bump("step"), detach=u32(number), sealed=named, seals=its_seal), planner)
            case ("fence",):
                number = bump("fence")
                ack = core.fence(Fence(number, NOW))
                assert (ack is None) == bool(under_way)
                if ack is None:
                    waiting.append((number, {work.number for work in under_way}))
            case ("takeover",):
                core.attach_scheduler(SchedulerEpoch(bump("epoch")))
                counters["step"] = 0
        core.check()
        for tier, pool in pools.items():
            _, seals = pool.packed()
            for block in range(pool.num_blocks):
                sealed_as = int.from_bytes(seals[16 * block : 16 * block + 16], "big")
                assert sealed_as in (0, content[tier][block])
