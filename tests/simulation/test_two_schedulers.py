"""A second scheduler takes the workers over, and dies for good: the first one serves again by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coppice_sim.base.timeline import MS
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.nemesis import FaultProfile
from coppice_sim.world import Scope, World

WITHIN_MS = 20_000  # of virtual time


def run_until(world: World, condition: Callable[[], bool]) -> None:
    until_ns = world.timeline.now_ns + WITHIN_MS * MS
    while not condition():
        assert world.timeline.now_ns < until_ns
        world.step()


def plans_everywhere(world: World, scheduler: SchedulerHost) -> bool:
    return all(host.core.planning == scheduler.epoch for host in world.cluster.workers.values())


def num_ended_well(world: World) -> int:
    return sum(ask.outcome in ("length", "stop") for ask in world.workload.asks.values())


@pytest.mark.parametrize("seed", range(700, 704))
def test_the_first_serves_again_when_the_second_is_gone_and_not_before(seed: int) -> None:
    world = World(seed, FaultProfile.none(), Scope(demands=False, check_every=0))
    first = world.cluster.schedulers["s0"]
    run_until(world, lambda: bool(first.epoch) and plans_everywhere(world, first))
    epoch = first.epoch
    world.cluster.start_scheduler("s1")
    second = world.cluster.schedulers["s1"]
    run_until(world, lambda: bool(second.epoch) and plans_everywhere(world, second))
    assert second.epoch > epoch
    run_until(world, lambda: world.record.sometimes["scheduler refused: superseded"] >= 10)
    assert not world.record.sometimes["epoch renewed"], "while the second lives they would only take turns"
    del world.cluster.schedulers["s1"]
    second.die()
    world.network.reset_all("s1")
    run_until(world, lambda: first.epoch > epoch and plans_everywhere(world, first))
    assert world.record.sometimes["epoch renewed"] == 1
    before = num_ended_well(world)
    run_until(world, lambda: num_ended_well(world) > before)
    world.heal()
