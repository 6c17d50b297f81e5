"""A second scheduler comes to a cell: workers are shared out. It dies for good: the first one has them all again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coppice_sim.base.timeline import MS
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.nemesis import FaultProfile
from coppice_sim.world import Scope, World

WITHIN_MS = 20_000  # of virtual time
SEEDS = range(700, 708)


def run_until(world: World, condition: Callable[[], bool]) -> None:
    until_ns = world.timeline.now_ns + WITHIN_MS * MS
    while not condition():
        assert world.timeline.now_ns < until_ns
        world.step()


def num_planned(world: World, scheduler: SchedulerHost) -> int:
    return sum(host.core.planning == scheduler.epoch for host in world.cluster.workers.values())


def num_ended_well(world: World, scheduler: SchedulerHost) -> int:
    asks = world.workload.asks.values()
    return sum(ask.host is scheduler and ask.outcome in ("length", "stop") for ask in asks)


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_are_shared_out_and_come_back_when_the_second_is_gone(seed: int) -> None:
    world = World(seed, FaultProfile.none(), Scope(disks=False, demands=False, check_every=0))
    num_workers = len(world.cluster.workers)
    first = world.cluster.schedulers["s0"]
    run_until(world, lambda: bool(first.epoch) and num_planned(world, first) == num_workers)
    epoch = first.epoch
    world.cluster.start_scheduler("s1")
    second = world.cluster.schedulers["s1"]
    share = num_workers // 2
    run_until(world, lambda: bool(second.epoch) and num_planned(world, second) == share)
    run_until(world, lambda: num_planned(world, first) == num_workers - share)
    for scheduler in (first, second)[: 1 + bool(share)]:
        before = num_ended_well(world, scheduler)
        run_until(world, lambda scheduler=scheduler, before=before: num_ended_well(world, scheduler) > before)  # type: ignore[misc]
    del world.cluster.schedulers["s1"]
    second.die()
    world.network.reset_all("s1")
    run_until(world, lambda: num_planned(world, first) == num_workers)
    assert first.epoch == epoch, "it was never asked to begin anew"
    world.heal()
    lost = [ask.request.request_id for ask in world.workload.asks.values() if ask.outcome == "broken stream"]
    assert not lost
