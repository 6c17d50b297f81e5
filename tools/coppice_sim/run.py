"""Run the simulation of one seed."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from coppice_cache.core.base.errors import InvariantBroken
from coppice_sim.base.environment import BrokenInvariantError
from coppice_sim.base.timeline import MS
from coppice_sim.nemesis import FaultProfile
from coppice_sim.world import WHOLE, Scope, World

DEFAULT_STEPS = 3_000


@dataclass(frozen=True, slots=True)
class Report:
    """What one seed did. `broken` is empty when everything held, else the invariant and the evidence."""

    seed: int
    events: int
    virtual_ms: int
    outcomes: Counter[str]
    sometimes: Counter[str]
    internal_errors: tuple[str, ...]
    faults: FaultProfile
    broken: str = ""
    history: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        verdict = f"BROKEN {self.broken}" if self.broken else "ok"
        return f"seed {self.seed}: {self.events} events, {self.virtual_ms} ms, {outcomes or 'no requests'}: {verdict}"


def run(
    seed: int,
    *,
    steps: int = DEFAULT_STEPS,
    faults: FaultProfile | None = None,
    scope: Scope = WHOLE,
) -> Report:
    """`steps` events with faults (drawn from the seed unless given), then heal and wait for rest."""
    world = World(seed, faults, scope)
    broken = ""
    try:
        for _ in range(steps):
            world.step()
        world.heal()
        if world.record.internal_errors:
            world.record.fail("O3", f"internal errors reached clients: {world.record.internal_errors[:3]}")
    except (BrokenInvariantError, InvariantBroken) as error:
        broken = str(error)
    except Exception as error:  # an assertion of a core, or a crash of one, is a finding like any other
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[:-6:-1])
        broken = f"{type(error).__name__}: {error} in {where}"
    return Report(
        seed=seed,
        events=world.timeline.num_done,
        virtual_ms=world.timeline.now_ns // MS,
        outcomes=Counter(ask.outcome or "open" for ask in world.workload.asks.values()),
        sometimes=+world.record.sometimes,
        internal_errors=tuple(world.record.internal_errors),
        faults=world.faults,
        broken=broken,
        history=tuple(world.record.history) if broken else (),
    )
