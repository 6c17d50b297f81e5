"""Progress (I17): while there is work and room for one sequence, tokens come out; who gives way gives blocks back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.request_log.stages import Preemption
from coppice_scheduler.core import engine
from coppice_scheduler.core.policy.preemption import Stakes
from coppice_scheduler.core.state.request import Finish
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import World

BLOCK = 4
QUIET_MS = 60.0  # many times what a step, a release and a second question take together

REQUESTS = st.lists(
    st.tuples(st.integers(1, 10), st.integers(1, 14), st.integers(0, 2)), min_size=1, max_size=7
)  # tokens of the prompt, tokens wanted, domain


def watched(num_blocks: int, requests: list[tuple[int, int, int]], ahead: int, step_us: int) -> tuple[World, list[int]]:
    """A small pool that fits each of them alone; the stake of each one that was preempted."""
    most = max(-(-(prompt + wanted) // BLOCK) for prompt, wanted, _ in requests)
    core = SchedulerSettings(
        instance=b"instance", max_running=8, max_step_tokens=24, max_chunk_tokens=8, extend_ahead_blocks=ahead
    )
    world = World(core, FakeIndex(BLOCK, retry_after_ms=5), 1)
    world.step_us = step_us
    world.add_worker("a", max(num_blocks, most))
    world.attach_index()
    stakes: list[int] = []
    life = world.core._life
    preempt = life.preempt

    def counted(request: RequestState, why: Preemption, now_ns: int) -> None:
        assert request.sequence is not None
        worker = life.workers[request.sequence.lease.worker_id]
        stakes.append(Stakes(worker).of(request.sequence))
        preempt(request, why, now_ns)

    life.preempt = counted  # type: ignore[method-assign]
    for number, (prompt, wanted, domain) in enumerate(requests):
        world.submit(f"r{number}", list(range(prompt)), wanted, domain="xyz"[domain], seed=number)
    return world, stakes


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 16), REQUESTS, st.integers(0, 2), st.sampled_from([0, 1_000]))
def test_tokens_come_out_while_there_is_work(
    num_blocks: int, requests: list[tuple[int, int, int]], ahead: int, step_us: int
) -> None:
    world, stakes = watched(num_blocks, requests, ahead, step_us)
    until_ms, before = QUIET_MS, 0
    while not world.core.is_idle():
        world.run(until_ms=until_ms)
        sampled = world.core.stats().total_sampled_tokens
        assert sampled > before or world.core.is_idle(), (
            f"nothing came out between {until_ms - QUIET_MS} and {until_ms} ms"
        )
        until_ms, before = until_ms + QUIET_MS, sampled
    assert [world.finish_of(f"r{number}") for number in range(len(requests))] == [Finish.LENGTH] * len(requests)
    assert all(stakes), "somebody was preempted for nothing"


def test_it_sees_a_scheduler_that_does_not_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "relieve", lambda life, worker, now_ns: None)
    world, _ = watched(4, [(3, 12, 0), (3, 12, 0), (3, 12, 0)], 0, 0)
    world.run(until_ms=5 * QUIET_MS)
    before = world.core.stats().total_sampled_tokens
    world.run(until_ms=6 * QUIET_MS)
    assert world.core.stats().total_sampled_tokens == before
    assert not world.core.is_idle()
