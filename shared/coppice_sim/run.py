"""Run the simulation: `run` for one seed, `main` for a command line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coppice_cache.core.errors import InvariantBroken
from coppice_sim.nemesis import FaultProfile
from coppice_sim.timeline import MS
from coppice_sim.world import BrokenInvariantError, World

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
    check_cores: bool = True,
    tiers: bool = True,
) -> Report:
    """`steps` events with faults (drawn from the seed unless given), then heal and wait for rest."""
    world = World(seed, faults, check_cores=check_cores, tiers=tiers)
    broken, history = "", ()
    try:
        for _ in range(steps):
            world.step()
        world.heal()
        if world.internal_errors:
            world.fail("O3", f"internal errors reached clients: {world.internal_errors[:3]}")
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
        sometimes=+world.sometimes,
        internal_errors=tuple(world.internal_errors),
        broken=broken,
        history=tuple(world.history) if broken else history,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """One line per seed; what broke, with the last events, and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="coppice sim",
        description="Run the three cores under faults, from seeds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, counted up from the first")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="events with faults, per seed")
    chosen = parser.parse_args(argv)
    sometimes: Counter[str] = Counter()
    failed = False
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        report = run(seed, steps=chosen.steps)
        sometimes += report.sometimes
        print(report.line)
        if report.broken:
            failed = True
            print("\n".join(f"    {event}" for event in report.history))
            print(f"    replay: coppice sim --seed {seed} --runs 1 --steps {chosen.steps}")
    print("sometimes: " + ", ".join(f"{name} {count}" for name, count in sorted(sometimes.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
