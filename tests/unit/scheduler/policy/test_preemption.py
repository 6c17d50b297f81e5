"""Shortage of blocks while running: who gives way, how often, and that the oldest always gets on."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Acquire, Extend, NoCapacityReason, Release
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, rows_of
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_worker import u32
from tests.fakes.scheduler.scheduler_world import World

POOL_FULL = NoCapacityReason.POOL_FULL
DOMAIN_MAXIMUM = NoCapacityReason.DOMAIN_MAXIMUM


def settings(**fields: object) -> SchedulerSettings:
    given = {"instance": b"instance", "max_running": 8, "max_step_tokens": 64, "extend_ahead_blocks": 0}
    return SchedulerSettings(**{**given, **fields})  # type: ignore[arg-type]


def answer_extends(bench: Bench, reason: NoCapacityReason, *, refused: set[int] | None = None) -> None:
    """Answer everything that waits; of the extends refuse those of the given leases (by number), or all."""
    while bench.batches:
        answers = []
        for op in bench.batches[0]:
            number = int.from_bytes(op.lease_id[8:], "little")
            no = isinstance(op, Extend) and (refused is None or number in refused)
            answers.append(bench.no(op, reason) if no else bench.yes(op))
        bench.answer_with(*answers)


def running(domains: str, **fields: object) -> Bench:
    """Requests a, b, ... of these domains, sequences and leases 1, 2, ...: all lack their next block and ask for it."""
    bench = Bench(settings(**fields))
    bench.hold = True
    for name, domain in zip("abcdef", domains, strict=False):
        bench.submit(name, 3, max_new=20, domain=domain)
    bench.advance()
    bench.answer_with(*(bench.yes(op) for op in bench.batches[0]))
    everybody = dict.fromkeys(range(1, len(domains) + 1), 9)
    bench.result(everybody)
    bench.result(everybody)
    bench.hold = False
    assert not bench.plans
    assert len(bench.ops(Extend)) == len(domains)
    return bench


def detached(bench: Bench) -> list[int]:
    return [sequence_id for plan in bench.plans for sequence_id in u32(plan.detach)]


def got_no_further(bench: Bench, name: str) -> None:
    """It was alone without a block before, and started over with as many tokens as it has now."""
    request = bench.core._life.requests[name]
    request.restarted_at = request.num_tokens


def test_the_latest_gives_way() -> None:
    bench = running("dddd")
    answer_extends(bench, POOL_FULL, refused={1})
    assert detached(bench) == [4]
    assert bench.core.stats().waiting == 1


def test_the_oldest_is_never_preempted_for_a_younger_one() -> None:
    bench = running("dddd")
    answer_extends(bench, POOL_FULL, refused={4})
    assert detached(bench) == [4], "the latest asked, and is itself the one to give way"


def test_one_shortage_preempts_once() -> None:
    bench = running("dddd")
    answer_extends(bench, POOL_FULL, refused={1})
    bench.advance(10)
    bench.submit("late", 5)
    assert bench.core.stats().total_preemptions == 1, "the victim's blocks are on their way: that is enough"
    while not bench.ops(Release):
        assert not bench.ops(Acquire), "nobody else takes what the stalled one waits for"
        rows = {1, 2, 3} - set(detached(bench))
        bench.result(dict.fromkeys(rows, 9))
    (batch,) = [batch for batch in bench.batches if any(isinstance(op, Release) for op in batch)]
    stalled = [op for op in batch if isinstance(op, Extend) and op.lease_id.endswith(b"\1" + bytes(7))]
    (release,) = [op for op in batch if isinstance(op, Release)]
    assert batch.index(release) < batch.index(stalled[0]), "the stalled one asks right after the release"
    assert bench.core.stats().total_preemptions == 1


@pytest.mark.parametrize(("domains", "reason"), [("d", POOL_FULL), ("dy", DOMAIN_MAXIMUM), ("dz", POOL_FULL)])
def test_somebody_alone_starts_over_once_for_each_length(domains: str, reason: NoCapacityReason) -> None:
    """Nobody else can give it a block, but its own may count twice. Others, of other domains, go on."""
    bench = running(domains, fixed_domains=frozenset({DomainId("z")}))
    answer_extends(bench, reason, refused={1})
    assert detached(bench) == [1]
    while not any(plan.attach for plan in bench.plans):
        bench.result(dict.fromkeys(set(u32(bench.plans[0].rows)) - {1}, 9))
        while bench.batches:
            bench.answer()
    (start,) = [start for plan in bench.plans for start in plan.attach]
    assert len(start.tokens) // 4 == 5, "prompt and both tokens that it had"
    assert bench.core.stats().total_preemptions == 1


def test_in_a_fixed_domain_nobody_is_alone_beside_others_of_it() -> None:
    bench = running("xxx", fixed_domains=frozenset({DomainId("x")}))
    answer_extends(bench, DOMAIN_MAXIMUM)
    assert sorted(detached(bench)) == [2, 3], "the oldest goes on"


def test_somebody_alone_who_got_no_further_waits() -> None:
    bench = running("d")
    got_no_further(bench, "a")
    answer_extends(bench, POOL_FULL)
    assert bench.core.stats().total_preemptions == 0
    bench.advance(49)
    assert not bench.ops(Extend)
    assert bench.core.next_wakeup_ns() == bench.now_ns + 1_000_000
    bench.advance(1)
    assert len(bench.ops(Extend)) == 1
    bench.answer()
    assert [(plan.repeat_rows, len(plan.grow)) for plan in bench.plans] == [(True, 1), (True, 0)], "it goes on"


@pytest.mark.parametrize(
    ("reason", "code"),
    [(POOL_FULL, OutputErrorCode.QUEUE_TIMEOUT), (DOMAIN_MAXIMUM, OutputErrorCode.TENANT_MAXIMUM)],
)
def test_waiting_for_a_block_has_an_end(reason: NoCapacityReason, code: OutputErrorCode) -> None:
    bench = running("d", queue_timeout_ms=120)
    got_no_further(bench, "a")
    for _ in range(4):
        answer_extends(bench, reason)
        bench.advance(40)
    error = bench.last("a").error
    assert error is not None
    assert error.code is code


def test_a_domain_at_its_maximum_preempts_only_within_it() -> None:
    bench = running("xxy")
    answer_extends(bench, DOMAIN_MAXIMUM, refused={1})
    assert detached(bench) == [2], "the latest of domain x; not 3, the latest of all"


def test_a_domain_at_its_maximum_keeps_only_its_own_requests_out() -> None:
    bench = running("xy")
    got_no_further(bench, "a")
    answer_extends(bench, DOMAIN_MAXIMUM, refused={1})
    bench.submit("mine", 5, domain="x")
    bench.submit("other", 5, domain="y")
    assert [op.domain for op in bench.ops(Acquire) if isinstance(op, Acquire)] == ["y"]


def test_a_full_pool_takes_from_the_domain_that_wants_more_before_any_other() -> None:
    bench = running("xxy")
    answer_extends(bench, POOL_FULL, refused={1})
    assert detached(bench) == [2], "the latest of domain x; not 3, whose share may be its own by right"


def test_a_full_pool_that_is_held_by_one_of_each_domain_takes_from_the_latest() -> None:
    bench = running("xyz")
    answer_extends(bench, POOL_FULL, refused={1})
    assert detached(bench) == [3]


def test_the_share_of_a_fixed_domain_helps_nobody_else_so_it_is_not_preempted() -> None:
    bench = running("xyz", fixed_domains=frozenset({DomainId("z")}))
    answer_extends(bench, POOL_FULL, refused={1})
    assert detached(bench) == [2]


def test_a_fixed_domain_comes_in_while_a_full_pool_keeps_others_out() -> None:
    bench = running("x", fixed_domains=frozenset({DomainId("z")}))
    got_no_further(bench, "a")
    answer_extends(bench, POOL_FULL)
    bench.submit("other", 5, domain="y")
    bench.submit("fixed", 5, domain="z")
    assert [op.domain for op in bench.ops(Acquire) if isinstance(op, Acquire)] == ["z"]


def test_a_closed_ledger_preempts_nobody() -> None:
    bench = running("dd")
    answer_extends(bench, NoCapacityReason.NO_WORKER)
    assert bench.core.stats().total_preemptions == 0


def test_a_refusal_ahead_of_need_preempts_nobody() -> None:
    bench = Bench(settings(extend_ahead_blocks=2, max_steps_in_flight=1))
    bench.hold = True
    bench.submit("a", 2, max_new=20)
    bench.submit("b", 2, max_new=20)
    bench.advance()
    bench.answer()
    assert len(bench.ops(Extend)) == 2
    answer_extends(bench, POOL_FULL)
    bench.result({1: 9, 2: 9})
    assert not bench.ops(Extend), "after a refusal no more is asked than the next token needs"
    assert bench.core.stats().total_preemptions == 0
    assert rows_of(bench.plans[0]) == {1: 1, 2: 1}, "they go on with what they have"


def test_a_running_request_that_can_never_grow_ends() -> None:
    bench = running("d")
    answer_extends(bench, NoCapacityReason.NEVER_FITS)
    error = bench.last("a").error
    assert error is not None
    assert error.code is OutputErrorCode.NEVER_FITS
    assert bench.last("a").num_output_tokens == 2


def test_a_victim_starts_over_with_all_its_tokens() -> None:
    bench = running("dd")
    answer_extends(bench, POOL_FULL, refused={1})
    while not any(plan.attach for plan in bench.plans):
        bench.result(dict.fromkeys({1} & set(u32(bench.plans[0].rows)), 9))
        while bench.batches:
            bench.answer(cached_blocks=1)
    (start,) = [start for plan in bench.plans for start in plan.attach]
    assert len(start.tokens) // 4 == 5, "prompt and both tokens that it had"
    assert start.sequence_id == 3, "a sequence id is never used twice"
    assert bench.text("b") == [9, 9]
    bench.cancel("b")
    assert (start.num_computed_tokens, bench.last("b").num_cached_tokens) == (4, 0), "users see the first grant's"


@pytest.mark.parametrize("seed", range(6))
def test_everybody_gets_on_in_a_pool_that_fits_only_one(seed: int) -> None:
    world = World(settings(extend_ahead_blocks=seed % 3), FakeIndex(4), seed)
    world.add_worker("a", 6)
    world.attach_index()
    for number in range(6):
        world.submit(f"r{number}", [seed, number, 1], 20, seed=number)
    world.run()
    assert [world.finish_of(f"r{number}") for number in range(6)] == [Finish.LENGTH] * 6
    assert world.core.stats().total_preemptions > 0
    assert world.core.is_idle()
