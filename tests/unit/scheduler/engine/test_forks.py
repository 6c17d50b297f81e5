"""Several continuations of one prompt: who waits, what is shared, what is copied, and what happens when one goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Acquire,
    NoCapacityReason,
    OpBatch,
    Publish,
    Reattached,
    Release,
    WorkerInfo,
    Workers,
)
from coppice.messages.step import Refusal, RefusalCode, SamplingParams, StepPlan
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W, rows_of, tokens_of
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE
from tests.fakes.scheduler.scheduler_worker import u32
from tests.fakes.scheduler.scheduler_world import World

PROMPT = list(range(1, 11))  # two full blocks and two tokens


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def family(bench: Bench, num_tokens: int = 10, size: int = 2, max_new: int = 6, **fields: object) -> None:
    """ "r0" and its forks."""
    bench.submit("r0", num_tokens, max_new, **fields)
    for number in range(1, size):
        assert bench.submit(f"r{number}", num_tokens, max_new, fork_of="r0", **fields) is None


def at_work(size: int = 2, **fields: object) -> Bench:
    """The prompt was computed and published, and its forks ask for memory."""
    bench = Bench(settings(max_steps_in_flight=1, **fields))
    family(bench, size=size)
    bench.settle()
    bench.result({1: 7})
    return bench


def sources_of(plan: StepPlan) -> list[int]:
    return [start.copy_from for start in plan.attach if start.copy_from]


def test_a_fork_holds_nothing_until_the_prompt_is_computed() -> None:
    bench = Bench()
    family(bench, size=3)
    assert len(bench.ops(Acquire)) == 1
    bench.settle()
    stats = bench.core.stats()
    assert (stats.running, stats.waiting, stats.leases) == (1, 2, 1)
    bench.result({1: 7})
    (batch,) = bench.batches
    assert [type(op) for op in batch] == [Publish, Acquire, Acquire], "in the batch that publishes the prompt, after it"
    assert all(isinstance(op, Publish) or op.tokens == tokens_of(10) for op in batch)  # type: ignore[union-attr]
    assert not any(op.may_wait for op in bench.ops(Acquire))  # type: ignore[union-attr]


def test_a_fork_shares_full_blocks_copies_the_tail_and_computes_one_token() -> None:
    bench = at_work()
    bench.answer(cached_blocks=2)
    bench.result({1: 8})
    (plan,) = bench.plans
    (start,) = plan.attach
    assert (len(start.shared) // HANDLE_BYTES, start.num_computed_tokens) == (2, 9)
    assert (start.copy_from, start.domain) == (1, "d")
    assert rows_of(plan) == {1: 1, 2: 1}
    bench.result({1: 9, 2: 20})
    assert bench.text("r1") == [20]


def test_a_prompt_of_whole_blocks_and_one_token_is_shared_and_nothing_is_copied() -> None:
    bench = Bench(settings(max_steps_in_flight=1))
    family(bench, num_tokens=9)
    bench.settle()
    bench.result({1: 7})
    bench.answer(cached_blocks=2)
    bench.result({1: 8})
    (plan,) = bench.plans
    assert (plan.attach[0].copy_from, plan.attach[0].num_computed_tokens) == (0, 8)


def test_where_nothing_is_published_all_of_the_prompt_is_copied() -> None:
    bench = at_work()
    bench.answer()
    bench.result({1: 8})
    (plan,) = bench.plans
    (start,) = plan.attach
    assert (start.shared, start.num_computed_tokens, start.copy_from) == (b"", 9, 1)


def test_a_fork_does_not_time_out_while_its_leader_computes_the_prompt() -> None:
    """However long that takes; when it is computed, the fork has the queue's timeout before it as others have."""
    bench = Bench(settings(max_steps_in_flight=1, max_step_tokens=8, queue_timeout_ms=100))
    family(bench, num_tokens=18)
    bench.settle()
    for _ in range(3):
        bench.advance(60)
        assert not bench.outputs
        bench.result({1: 7} if rows_of(bench.plans[0]) == {1: 2} else {})
    bench.advance(99)
    assert [output.request_id for output in bench.outputs] == ["r0"], "its first token"
    bench.advance(1)
    error = bench.last("r1").error
    assert error is not None
    assert error.code is OutputErrorCode.QUEUE_TIMEOUT


def test_a_fork_times_out_with_a_leader_that_finds_no_place() -> None:
    bench = Bench(settings(max_running=1, queue_timeout_ms=100))
    bench.submit("runs", 1, max_new=50)
    bench.answer()
    family(bench)
    bench.advance(100)
    for name in ("r0", "r1"):
        assert bench.last(name).finish is Finish.ERROR


def test_without_its_leader_a_fork_computes_what_it_did_not_find() -> None:
    """The leader ends with its first token, and goes in the step before the fork's grant is there."""
    bench = Bench(settings(max_steps_in_flight=1))
    bench.submit("r0", 10, max_new=1)
    bench.submit("r1", 10, max_new=3, fork_of="r0")
    bench.settle()
    bench.result({1: 7})
    assert bench.last("r0").finish is Finish.LENGTH
    bench.answer(cached_blocks=2)
    bench.result()
    (plan,) = bench.plans
    assert (sources_of(plan), plan.attach[0].num_computed_tokens, rows_of(plan)) == ([], 8, {2: 2})


def test_a_leader_that_goes_before_the_copy_was_planned_is_copied_in_the_step_that_removes_it_or_not_at_all() -> None:
    bench = at_work()
    bench.answer(cached_blocks=2)
    bench.cancel("r0")
    bench.result({1: 8})
    (plan,) = bench.plans
    assert u32(plan.detach) == [1]
    assert sources_of(plan) == [1], "its blocks are released after this very step"
    assert not bench.ops(Release)
    bench.result({2: 9})
    assert len(bench.ops(Release)) == 1

    bench = at_work()
    bench.cancel("r0")
    bench.result()
    assert u32(bench.plans[0].detach) == [1]
    bench.answer(cached_blocks=2)
    bench.result()
    (plan,) = bench.plans
    assert (sources_of(plan), rows_of(plan)) == ([], {2: 2})


def test_a_source_that_is_lost_while_its_fork_waits_for_its_first_plan_is_not_copied() -> None:
    bench = at_work()
    publish = bench.ops(Publish)[0]
    bench.answer(cached_blocks=2)
    bench.core.index_message(Reattached(bench.cache_epoch, (), (publish.lease_id,)), bench.now_ns)
    bench.result({1: 8})
    while not bench.plans[0].attach:
        bench.result()
    (plan,) = bench.plans
    assert (sources_of(plan), rows_of(plan)) == ([], {2: 2})


def test_the_source_is_not_released_before_the_step_of_the_copy_has_completed() -> None:
    bench = Bench(settings(max_steps_in_flight=3))
    family(bench)
    bench.settle()
    bench.result({1: 7})
    bench.settle()
    while not sources_of(bench.plans[-1]):
        bench.result({1: 8})
        bench.settle()
    bench.cancel("r0")
    while bench.plans and not sources_of(bench.plans[0]):
        assert not bench.ops(Release)
        bench.result({1: 8})
    assert not bench.ops(Release)
    bench.result({1: 8, 2: 9})
    while bench.plans and not bench.ops(Release):
        bench.result({2: 9})
    assert len(bench.ops(Release)) == 1


@pytest.mark.parametrize("gone", ["cancelled", "failed"])
def test_another_fork_computes_the_prompt_of_a_leader_that_goes_before_its_first_token(gone: str) -> None:
    bench = Bench(settings(max_retries=0, max_steps_in_flight=1))
    family(bench, size=3)
    bench.settle()
    if gone == "cancelled":
        bench.cancel("r0")
    else:
        bench.result(refusals=(Refusal(1, RefusalCode.NOT_RESERVED, 0),))  # type: ignore[arg-type]
    assert len(bench.ops(Acquire)) == 1
    bench.settle()
    while not any(start.sequence_id == 2 for start in bench.plans[0].attach):
        bench.result()
    bench.result({2: 5})
    assert len(bench.ops(Acquire)) == 1, "the third waited for the second"
    assert bench.text("r1") == [5]


@pytest.mark.parametrize("is_attached", [False, True])
def test_what_a_fork_is_still_to_copy_is_not_published_when_it_goes(is_attached: bool) -> None:
    """Nothing is in those blocks before the result of the step that copies: they would be found, and be wrong."""
    bench = at_work()
    bench.answer()
    if is_attached:
        bench.result({1: 8})
        assert sources_of(bench.plans[0])
    bench.cancel("r1")
    assert not bench.ops(Publish)
    for token in (9, 10):
        bench.result({1: token})
        assert not bench.ops(Publish)


def test_cancelled_alone_in_every_state() -> None:
    bench = Bench(settings(max_steps_in_flight=1))
    family(bench, size=4)
    bench.cancel("r3")
    bench.settle()
    bench.result({1: 7})
    bench.cancel("r2")
    bench.settle()
    bench.result({1: 7})
    bench.cancel("r1")
    for name in ("r1", "r2", "r3"):
        assert bench.last(name).finish is Finish.CANCELLED
    assert bench.core.stats().running == 1


def test_no_relation_across_domains_prompts_or_with_who_wants_log_probabilities_of_the_prompt() -> None:
    bench = Bench()
    bench.submit("r0", 10)
    bench.submit("domain", 10, fork_of="r0", domain="other")
    bench.submit("prompt", 11, fork_of="r0")
    bench.submit("logprobs", 10, fork_of="r0", sampling=SamplingParams(num_logprobs=0, num_prompt_logprobs=0))
    bench.submit("nobody", 10, fork_of="never was")
    assert len(bench.ops(Acquire)) == 5


def test_forks_count_for_the_limits_but_are_not_taken_for_a_queue() -> None:
    limits = TenantLimits(max_concurrency=4, max_queued=1)
    bench = Bench(settings(default_limits=limits))
    family(bench, size=4)
    refused = bench.submit("r4", 10, fork_of="r0")
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY


def test_a_source_that_was_taken_away_behind_our_back_costs_no_retry() -> None:
    bench = at_work(max_retries=0)
    bench.answer(cached_blocks=2)
    bench.result({1: 8})
    assert sources_of(bench.plans[0]) == [1]
    bench.result({1: 9}, (Refusal(2, RefusalCode.LOST_SOURCE, 0),))  # type: ignore[arg-type]
    assert not [o for o in bench.outputs if o.finish is not None]
    bench.answer(cached_blocks=2)
    while not any(plan.attach for plan in bench.plans):
        bench.result({1: 10})
    assert not sources_of(bench.plans[-1])
    assert rows_of(bench.plans[-1])[3] == 2


def test_a_copy_of_the_whole_prompt_is_not_taken_from_a_fork_whose_own_copy_is_on_its_way() -> None:
    bench = at_work(size=3)
    acquires = bench.ops(Acquire)
    assert len(acquires) == 2
    bench.cancel("r0")
    bench.result({1: 8})
    bench.answer(cached_blocks=2)
    for plan in bench.plans:
        attached = {start.sequence_id for start in plan.attach}
        assert not attached & set(sources_of(plan))


def test_a_fork_goes_where_its_prompt_is_and_elsewhere_once_it_was_refused_there() -> None:
    world = World(settings(), FakeIndex(BLOCK), seed=3)
    world.add_worker("a", 40)
    world.add_worker("b", 40)
    world.attach_index()
    world.submit("r0", PROMPT, 12)
    world.submit("r1", PROMPT, 12, seed=1, fork_of="r0")
    world.run()
    leader, fork = _acquires(world)
    assert len(leader.candidates) == 2
    assert len(fork.candidates) == 1
    assert world.finish_of("r1") is Finish.LENGTH

    bench = at_work()
    batch = bench.batches[-1]
    bench.answer_with(
        *[bench.no(op, NoCapacityReason.POOL_FULL) if isinstance(op, Acquire) else bench.yes(op) for op in batch]
    )
    bench.advance(after_ms=60)
    bench.settle()
    while not any(plan.attach for plan in bench.plans):
        bench.result({1: 8})
        bench.settle()
    assert sources_of(bench.plans[-1]), "where it got in may be where its source is"


def test_a_fork_that_is_refused_where_its_prompt_is_holds_nobody_up_and_asks_all_next() -> None:
    bench = Bench(settings(max_steps_in_flight=1))
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", bench.num_blocks, BLOCK, NAMESPACE, "m", True)
    bench.core.index_message(Workers(bench.cache_epoch, (info, replace(info, worker_id=WorkerId("w1")))), 0)
    bench.core.worker_attached(WorkerId("w1"), WorkerEpoch(1), True, 0)
    family(bench)
    bench.settle()
    bench.result({1: 7})
    published, fork = bench.batches[-1]
    assert isinstance(fork, Acquire)
    assert [candidate.worker_id for candidate in fork.candidates] == [W], "where it can copy its prompt"
    bench.hold = True
    bench.submit("next", 20)
    bench.answer_with(bench.yes(published), bench.no(fork, NoCapacityReason.NO_WORKER))  # it drains
    asked = [op for op in bench.ops(Acquire) if isinstance(op, Acquire)]
    assert sorted((len(op.tokens) // TOKEN_BYTES, len(op.candidates)) for op in asked) == [(10, 2), (20, 2)]


def _acquires(world: World) -> list[Acquire]:
    return [op for sent in world.sent_ops if isinstance(sent, OpBatch) for op in sent.ops if isinstance(op, Acquire)]


@pytest.mark.parametrize("domain", ["d", "trackless"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 9, 10])
def test_every_fork_says_what_its_own_seed_says(domain: str, num_tokens: int) -> None:
    world = World(settings(max_step_tokens=9), FakeIndex(BLOCK), seed=num_tokens)
    world.index.disabled.add("trackless")
    world.add_worker("a", 60)
    world.attach_index()
    for number in range(8):
        fork_of = "r0" if number else None
        world.submit(f"r{number}", PROMPT[:num_tokens], 6, domain=domain, seed=number, fork_of=fork_of)
    world.run()
    assert all(world.finish_of(f"r{number}") is Finish.LENGTH for number in range(8))
    (worker,) = world.workers.values()
    copied = -(-(num_tokens - 1) // BLOCK) if domain == "trackless" else (num_tokens - 1) % BLOCK > 0
    assert worker.num_copies == 7 * copied
    computed = world.core.stats().total_prefill_tokens
    assert computed == num_tokens + 7, "the prompt once, and one token of it for each fork"
