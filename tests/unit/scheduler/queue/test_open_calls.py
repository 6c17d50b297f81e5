"""A call of many steps comes in once: its places are its own until it ends, whatever else comes or goes."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId
from coppice_scheduler.core.state.request import (
    Finish,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
)
from coppice_scheduler.core.state.settings import Maximum, SchedulerSettings, TenantLimits, TenantSettings
from tests.fakes.scheduler.scheduler_bench import MS, Bench

S = 1000 * MS
D = DomainId("d")
ABORTED = OutputError(OutputErrorCode.ABORTED, "aborted")


def bench(max_waiting: int = 64, **limits: object) -> Bench:
    tenants = {"t": TenantLimits(**limits), "u": TenantLimits()}  # type: ignore[arg-type]
    return Bench(
        SchedulerSettings(
            instance=b"instance",
            max_running=8,
            max_step_tokens=64,
            extend_more_blocks=0,
            max_queued=max_waiting,
            tenants=tenants,
        )
    )


def open_call(world: Bench, name: str = "call", num_places: int = 2) -> Refused | None:
    return world.submit(name, 0, num_places=num_places, streams=False)


def step(world: Bench, name: str, call: str = "call", fork_of: str | None = None) -> Refused | None:
    return world.submit(name, 4, max_new=1, step_of=call, fork_of=fork_of, streams=False)


def reason(refused: Refused | None) -> RefusedReason | None:
    return refused and refused.reason


def run(world: Bench) -> None:
    """All steps that were submitted come to their end."""
    while world.batches or world.plans:
        world.answer() if world.batches else world.result(dict.fromkeys(range(1, 99), 5))


def test_it_holds_its_places_whether_its_steps_use_them_or_not() -> None:
    world = bench(max_concurrency=3)
    assert open_call(world) is None
    for name in ("first", "second"):
        assert step(world, name, fork_of=None if name == "first" else "first") is None
    assert world.submit("other", 4) is None, "two of three places are the call's, with its steps"
    assert reason(world.submit("more", 4)) is RefusedReason.TENANT_CONCURRENCY
    world.cancel("first")
    world.cancel("second")
    assert reason(world.submit("more", 4)) is RefusedReason.TENANT_CONCURRENCY, "no step is at work, and yet"
    world.cancel("call")
    assert world.submit("more", 4) is None
    world.core.check()


def test_one_that_finds_too_few_places_is_refused_at_its_start() -> None:
    world = bench(max_concurrency=3)
    assert world.submit("a", 4) is None
    assert world.submit("b", 4) is None
    refused = open_call(world)
    assert refused is not None
    assert refused.reason is RefusedReason.TENANT_CONCURRENCY
    assert "needs 2 places" in refused.message
    assert refused.retry_after_ms > 0
    assert reason(step(world, "first")) is RefusedReason.CALL_ENDED


def test_after_the_first_step_no_full_queue_and_no_drain_stops_it() -> None:
    world = bench(max_waiting=2, max_queued=1)
    assert open_call(world) is None
    assert step(world, "first") is None
    world.hold = True
    for place in range(8):
        world.submit(f"u{place}", 4, tenant="u")
    assert reason(world.submit("plain", 4)) is RefusedReason.QUEUE_FULL
    assert step(world, "second", fork_of="first") is None
    world.cancel("second")
    world.core.drain()
    assert reason(world.submit("late", 4)) is RefusedReason.DRAINING
    assert reason(open_call(world, "late call")) is RefusedReason.DRAINING
    assert step(world, "third", fork_of="first") is None


def test_the_first_step_meets_what_every_request_meets() -> None:
    world = bench(requests_per_minute=1)
    assert open_call(world, "one") is None
    assert step(world, "first", "one") is None
    assert open_call(world, "two") is None
    assert reason(step(world, "other", "two")) is RefusedReason.TENANT_RATE


def test_it_has_no_more_steps_at_once_than_places() -> None:
    world = bench()
    assert open_call(world, num_places=1) is None
    assert step(world, "first") is None
    assert reason(step(world, "second", fork_of="first")) is RefusedReason.INTERNAL


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.CANCELLED, Finish.ERROR])
def test_it_ends_once_and_its_steps_end_as_requests_do(finish: Finish) -> None:
    world = bench()
    open_call(world)
    step(world, "first")
    assert not world.core.is_idle()
    if finish is Finish.ERROR:
        assert world.core.end("call", ABORTED, world.now_ns)
    else:
        world.core.cancel("call", world.now_ns, finish)
    assert not world.core.end("call", ABORTED, world.now_ns)
    world.advance()
    (last,) = [output for output in world.outputs if output.request_id == "call"]
    assert (last.finish, last.error) == (finish, ABORTED if finish is Finish.ERROR else None)
    assert reason(step(world, "second", fork_of="first")) is RefusedReason.CALL_ENDED
    world.core.check()
    world.cancel("first")
    world.core.check()
    assert [output.request_id for output in world.outputs if output.finish] == ["call", "first"]


def test_its_duration_is_measured_not_that_of_its_steps() -> None:
    world = bench()
    open_call(world)
    step(world, "first")
    world.now_ns += 1 * S
    run(world)
    recent = world.core._life.recent
    assert recent.num_tokens("t") == 1
    assert recent.duration_ns("t") == 0
    world.now_ns += 2 * S
    world.core.cancel("call", world.now_ns, Finish.STOP)
    assert recent.duration_ns("t") == 3 * S


def test_one_of_a_tenant_that_is_removed_ends_with_an_error() -> None:
    world = bench()
    open_call(world)
    world.core.set_tenants(
        TenantSettings({"u": TenantLimits()}, {"u": D}, frozenset(), {}, {D: Maximum()}), world.now_ns
    )
    world.advance()
    error = world.last("call").error
    assert error is not None
    assert error.code is OutputErrorCode.TENANT_REMOVED
    assert reason(open_call(world)) is RefusedReason.TENANT_REMOVED
