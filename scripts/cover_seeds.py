"""Seeds for a short list of `tests/simulation`: a few that together show every kind of trouble.

    python -m scripts.cover_seeds --first 1 --runs 60 --keep 40,73

Runs the seeds as `test_every_invariant_holds_under_faults_and_every_kind_of_trouble_occurs` does, and takes them
greedily: first those that are kept, then whichever shows most of what is still missing. Exit code 1: something is
missing in the end, or a run broke.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from coppice_sim.run import run
from coppice_sim.world import Scope
from tests.simulation.test_seeds import SOMETIMES, STEPS


def greedy_cover(shown: Mapping[int, frozenset[str]], wanted: frozenset[str], kept: Sequence[int]) -> list[int]:
    """Seeds of `shown`, with `kept` at the beginning, until they show all that any of them shows."""
    chosen = [seed for seed in kept if seed in shown]
    missing = wanted.difference(*(shown[seed] for seed in chosen))
    while missing:
        best = max(sorted(shown), key=lambda seed: len(shown[seed] & missing))
        if not shown[best] & missing:
            break
        chosen.append(best)
        missing -= shown[best]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description="Choose seeds that together show every kind of trouble.")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--runs", type=int, default=60, help="how many seeds")
    parser.add_argument("--keep", default="", help="seeds that are taken in any case, with commas")
    chosen = parser.parse_args()
    kept = [int(word) for word in chosen.keep.split(",") if word]
    wanted = frozenset(SOMETIMES)
    shown: dict[int, frozenset[str]] = {}
    broken = []
    for seed in dict.fromkeys([*kept, *range(chosen.first, chosen.first + chosen.runs)]):
        report = run(seed, steps=STEPS, scope=Scope(reloads=False, drains=False))
        if report.broken:
            broken.append(seed)
            print(report.line)
        shown[seed] = frozenset(report.sometimes) & wanted
        missing = wanted.difference(*(shown[one] for one in greedy_cover(shown, wanted, kept)))
        print(f"seed {seed}: {len(missing)} kinds are missing{': ' + ', '.join(sorted(missing)) if missing else ''}")
        if not missing:
            break
    print(f"FEW_SEEDS = {tuple(sorted(greedy_cover(shown, wanted, kept)))}")
    return 1 if missing or broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
