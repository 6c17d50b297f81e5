"""What tenants get of each other's scheduler, measured at a worker with stated step costs, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.fair_world import MS, Costs, FairWorld

WINDOW_MS = 10_000
STEP_COSTS = ("step_us", "prefill_token_us", "decode_row_us")


def settings(max_running: int, weights: Mapping[str, float] | None = None, **fields: object) -> SchedulerSettings:
    tenants = {tenant: TenantLimits(weight=weight) for tenant, weight in (weights or {}).items()}
    return SchedulerSettings(instance=b"instance", max_running=max_running, tenants=tenants, **fields)  # type: ignore[arg-type]


def visited(num_flood: int, max_running: int, num_blocks: int, slowness: int = 1) -> FairWorld:
    """A victim comes every 120 ms, while another tenant's flood of equal weight is worked off."""
    costs = Costs()
    costs = replace(costs, **{name: slowness * getattr(costs, name) for name in STEP_COSTS})
    world = FairWorld(settings(max_running), costs, num_blocks=num_blocks)
    for _ in range(num_flood):
        world.submit("flood", 512, 128)
    for visit in range(20):
        world.at(slowness * (200 + visit * 120), lambda: world.submit("victim", 128, 16))
    world.run()
    return world


def p99(world: FairWorld) -> float:
    return float(np.percentile(world.ttfts_ms("victim"), 99))


@pytest.mark.parametrize(
    ("max_running", "num_blocks"),
    [(8, 8192), (32, 8192), (256, 8192), (8, 400), (256, 1000)],
    ids=["few places", "places", "room for all", "few places, little memory", "little memory"],
)
def test_a_flood_of_another_tenant_costs_a_victim_few_steps(max_running: int, num_blocks: int) -> None:
    """The one in flight when it comes; and where memory is lacking, the one that lets somebody go."""
    alone = p99(visited(0, max_running, num_blocks))
    world = visited(120, max_running, num_blocks)
    assert all(visit.last is not None for visit in world.visits.values())
    assert world.longest_step_ns < 60 * MS
    assert p99(world) <= 3 * alone + 2 * world.longest_step_ns / MS


def test_where_steps_are_long_a_victim_waits_for_the_one_at_work_only() -> None:
    """And for none that was sent ahead of it; its own first one may be nearly as long."""
    alone = p99(visited(0, 256, 8192, slowness=10))
    world = visited(120, 256, 8192, slowness=10)
    assert world.longest_step_ns > 200 * MS
    assert p99(world) <= alone + 1.5 * world.longest_step_ns / MS


SHAPES = {
    "alike": {"a": (256, 64), "b": (256, 64)},
    "prompts and outputs": {"a": (512, 16), "b": (64, 128)},
    "long outputs": {"a": (32, 200), "b": (256, 32)},
}


@pytest.mark.parametrize(
    "weights",
    [pytest.param((1.0, 1.0), marks=pytest.mark.wide), (1.0, 3.0), pytest.param((3.0, 1.0), marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", ["alike", *(pytest.param(shape, marks=pytest.mark.wide) for shape in SHAPES if shape != "alike")]
)
def test_backlogged_tenants_are_served_by_their_weights(shape: str, weights: tuple[float, float]) -> None:
    given = dict(zip("ab", weights, strict=True))
    world = FairWorld(settings(8, given), num_blocks=8192)
    world.on_end = lambda visit: world.submit(visit.request.tenant, *SHAPES[shape][visit.request.tenant])
    for _ in range(24):
        for tenant in "ab":
            world.submit(tenant, *SHAPES[shape][tenant])
    world.run(until_ms=2000 + WINDOW_MS + 2000)
    for start_ms in (2000, 3000, 4000):
        service = world.service(start_ms, start_ms + WINDOW_MS)
        for tenant, weight in given.items():
            share = service[tenant] / sum(service.values())
            assert share == pytest.approx(weight / sum(weights), rel=0.1)
    assert world.core.stats().total_preemptions < world.core.stats().total_finished / 20, "places go back and forth"


def test_who_holds_every_place_for_long_gives_some_to_a_tenant_with_a_backlog() -> None:
    world = FairWorld(settings(8), num_blocks=8192)
    for _ in range(24):
        world.submit("long", 64, 2000)
    for _ in range(12):
        world.at(1000, lambda: world.submit("late", 64, 100))
    world.run(until_ms=4000)
    service = world.service(1000, 4000)
    assert service["late"] > 0.4 * service["long"]
