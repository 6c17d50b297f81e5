"""Non-interference of whole runs: what a tenant is told does not depend on what the others' prompts say.

Each seed is run twice, with all its faults: once everybody draws prompts from the same runs of tokens, once the others
write theirs in other tokens, one for one (`traffic/observer.py`). Nothing but content differs, so everything that one
tenant hears must be equal: tokens, usage, order, errors, refusals with their `Retry-After`, counts, and the times of
all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from coppice_cache.core.base.settings import Mode
from coppice_sim.base.timeline import MS
from coppice_sim.nemesis import FaultProfile
from coppice_sim.traffic.demands import Demands
from coppice_sim.traffic.observer import Observer
from coppice_sim.traffic.visitor import ROUND_MS, Visitor
from coppice_sim.world import Scope, World

SCOPE = Scope(check_every=0)
STEP_MS_MAX = 2.0
Heard = list[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one tenant heard in two worlds. `difference` is empty when it was the same."""

    num_heard: int
    difference: str = ""


def domains_of(seed: int) -> tuple[str, ...]:
    return World(seed, FaultProfile.none(), SCOPE).settings.domains


def compare(seed: int, tenant: str, *, steps: int) -> Comparison:
    """The first `steps` events of both worlds, with the faults that the seed draws."""
    plain = _heard(seed, Observer(tenant, disguises_others=False), steps)
    disguised = _heard(seed, Observer(tenant, disguises_others=True), steps)
    return Comparison(len(plain), first_difference(plain, disguised))


def _heard(seed: int, observer: Observer, steps: int) -> Heard:
    world = World(seed, None, SCOPE, observer)
    for _ in range(steps):
        world.step()
    return observer.heard


def first_difference(one: Heard, other: Heard) -> str:
    for number, (left, right) in enumerate(zip_longest(one, other)):
        if left != right:
            return f"entry {number}: {left} here, {right} there"
    return ""


# --- with and without the others


def compare_alone(seed: int, *, num_rounds: int, num_schedulers: int = 1) -> Comparison | None:
    """What a strict tenant is told while others flood, and alone. None: the seed has no strict tenant beside others,
    fewer workers than schedulers, or steps so slow that what it asks may not end within a round."""
    settings = World(seed, FaultProfile.none(), SCOPE).settings
    strict = [config.domain for config in settings.index.domains if config.mode is Mode.STRICT]
    if settings.step_ms > STEP_MS_MAX or not strict or not Demands(seed).limits(settings.index.domains):
        return None
    if settings.num_workers < num_schedulers:
        return None
    beside = _told(seed, Visitor(strict[0], seed), frozenset(strict), num_rounds, num_schedulers)
    alone = _told(seed, Visitor(strict[0], seed), frozenset(settings.domains), num_rounds, num_schedulers)
    return Comparison(len(alone), first_difference(beside, alone))


def _told(seed: int, visitor: Visitor, absent: frozenset[str], num_rounds: int, num_schedulers: int) -> Heard:
    world = World(seed, FaultProfile.none(), replace(SCOPE, absent=absent, max_running=3), visitor)
    for number in range(1, num_schedulers):
        world.cluster.start_scheduler(f"s{number}")
    visitor.visit(world.timeline, world.cluster, world.workload, num_rounds)
    end_ns = world.timeline.now_ns + (num_rounds + 1) * ROUND_MS * MS
    while world.timeline.now_ns < end_ns:
        world.step()
    return [(request_id, *told) for request_id, told in visitor.told.items()]
