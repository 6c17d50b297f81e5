"""Workers drain, among other faults and alone: what they have goes on, nothing new comes, until requests come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from coppice.ids import WorkerId
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.worker import WorkerHost
from coppice_sim.nemesis import FaultProfile
from coppice_sim.run import run
from coppice_sim.world import Scope, World

WITHIN_MS = 20_000  # of virtual time
FEW_SEEDS = (1, 11, 22)  # together they show all of these
SOMETIMES = (
    "cut while it drained",
    "drain",
    "drain of an epoch that is over",
    "drain said again",
    "drain where blocks are kept for somebody",
    "drain where somebody waits",
    "drain where something runs",
    "drained until nothing ran",
    "drains to the end of the run",
    "drains to the end of the run of several schedulers",
    "registered while it drains",
    "takes new leases again",
    "undrained",
)


def held(seeds: range | tuple[int, ...], steps: int, faults: FaultProfile) -> Counter[str]:
    sometimes: Counter[str] = Counter()
    for seed in seeds:
        report = run(seed, steps=steps, faults=faults)
        assert not report.broken, "\n".join((report.line, *report.history))
        sometimes += report.sometimes
    return sometimes


def run_until(world: World, condition: Callable[[], bool]) -> None:
    until_ns = world.timeline.now_ns + WITHIN_MS * MS
    while not condition():
        assert world.timeline.now_ns < until_ns
        world.step()


def test_every_invariant_holds_while_workers_drain_and_every_kind_of_drain_occurs() -> None:
    sometimes = held(FEW_SEEDS, 2_500, FaultProfile.draining())
    assert [name for name in SOMETIMES if not sometimes[name]] == []


@pytest.mark.parametrize("seed", [720, 721, 722])
def test_a_drain_alone_ends_no_request(seed: int) -> None:
    world = World(seed, FaultProfile.none(), Scope(disks=False, demands=False, check_every=4))
    hosts = list(world.cluster.workers.values())
    run_until(world, lambda: all(host.core.worker_epoch for host in hosts))
    first = hosts[0]
    for _ in range(6):
        first.drain()
        run_until(world, lambda: first.is_quiet and knows(world, first, drains=True))
        first.undrain()
        run_until(world, lambda: knows(world, first, drains=False) and not first.is_quiet)
    world.heal()
    assert not [ask for ask in world.workload.asks.values() if ask.outcome == "broken stream"]
    assert not [name for name in world.record.sometimes if name.startswith(("error: session", "error: worker"))]


def test_what_one_worker_takes_no_more_another_one_gets_and_the_first_is_used_again() -> None:
    world = World(700, FaultProfile.none(), Scope(disks=False, demands=False, check_every=4))
    assert len(world.cluster.workers) > 1
    first, second = list(world.cluster.workers.values())[:2]
    run_until(world, lambda: bool(first.core.worker_epoch and second.core.worker_epoch))
    first.drain()
    run_until(world, lambda: first.is_quiet and knows(world, first, drains=True))
    steps = first.core.stats().steps
    before = num_ended_well(world)
    run_until(world, lambda: num_ended_well(world) >= before + 10)
    assert first.core.stats().steps <= steps + 1, "no more than what detaches"
    first.undrain()
    run_until(world, lambda: not first.is_quiet)
    world.heal()


def test_a_scheduler_whose_only_worker_drains_gets_another_one_and_answers() -> None:
    faults = replace(FaultProfile.none(), more_workers=1.0)
    world = World(700, faults, Scope(demands=False, check_every=4))
    hosts = list(world.cluster.workers.values())
    assert len(hosts) == 3
    run_until(world, lambda: all(host.core.worker_epoch for host in hosts))
    world.cluster.start_scheduler("s1")
    scheduler = world.cluster.schedulers["s1"]

    def planned() -> list[WorkerHost]:
        return [host for host in hosts if scheduler.epoch and host.core.planning == scheduler.epoch]

    run_until(world, lambda: len(planned()) == 1)
    (only,) = planned()
    only.drain()
    run_until(world, lambda: len(planned()) == 2)
    assert only in planned()
    before = num_ended_well(world, "s1")
    run_until(world, lambda: only.is_quiet and num_ended_well(world, "s1") >= before + 5)
    world.heal()


def knows(world: World, host: WorkerHost, *, drains: bool) -> bool:
    known = world.cluster.cache.core.state.workers[WorkerId(host.name)]
    return known.draining == drains == host.core.is_draining


def num_ended_well(world: World, scheduler: str = "") -> int:
    """Of all, or of this one."""
    asks = [ask for ask in world.workload.asks.values() if not scheduler or ask.host.name == scheduler]
    return sum(ask.outcome in ("length", "stop") for ask in asks)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(3_000, 3_080, 20))
def test_many_seeds_of_drains(first: int) -> None:
    held(range(first, first + 20), 4_000, FaultProfile.draining())
