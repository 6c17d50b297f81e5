"""Without faults no worker stands idle while somebody waits (I17), however little memory there is."""

from __future__ import annotations

import pytest

from coppice_sim.base.timeline import MS
from coppice_sim.nemesis import FaultProfile
from coppice_sim.world import Scope, World

pytestmark = pytest.mark.wide

LASTS_MS = 5_000
IDLE_MS_MAX = 200  # several steps, and every pause before something is asked again
OPENS_MS = 1_100  # until the first worker's window closes


# 701: a block that two published counts twice for who runs alone; 704, 706: guarantees leave four blocks to the others.
@pytest.mark.parametrize("seed", [701, 709, *(pytest.param(seed, marks=pytest.mark.wide) for seed in (704, 706))])
def test_no_worker_stands_idle_while_requests_wait(seed: int) -> None:
    world = World(seed, FaultProfile.none(), Scope(tiers=False, demands=False, check_every=0))
    steps, worked_ns = 0, OPENS_MS * MS
    while (now_ns := world.timeline.now_ns) < LASTS_MS * MS:
        world.step()
        done = sum(host.core.stats().steps for host in world.cluster.workers.values())
        if done > steps or world.cluster.schedulers["s0"].core.is_idle():
            steps, worked_ns = done, max(worked_ns, now_ns)
        assert now_ns - worked_ns < IDLE_MS_MAX * MS, f"idle since {worked_ns / MS:.0f} ms"
    assert steps > 500
