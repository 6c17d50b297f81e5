"""The command line of the simulation: many seeds, a line for each or for those that break, and how to replay them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from coppice_sim.nemesis import PROFILES, RATES, WEATHER
from coppice_sim.run import DEFAULT_STEPS, Report
from coppice_sim.shrink import SCOPES, Case, shrink

_PROGRESS_EVERY = 100


def main(argv: Sequence[str] | None = None) -> int:
    """One line per seed; what broke, with the last events and a command that replays it, and exit code 1."""
    chosen = _parser().parse_args(argv)
    case = Case(chosen.seed, chosen.steps, chosen.profile, chosen.without, chosen.check_every)
    cases = [replace(case, seed=seed) for seed in range(chosen.seed, chosen.seed + chosen.runs)]
    sometimes: Counter[str] = Counter()
    events = 0
    broken: list[int] = []
    try:
        for number, (one, report) in enumerate(zip(cases, _reports(cases, chosen.jobs), strict=True), start=1):
            sometimes += report.sometimes
            events += report.events
            if report.broken or not chosen.brief:
                print(report.line, flush=True)
            elif number % _PROGRESS_EVERY == 0:
                print(f"{number} of {len(cases)} seeds, {events} events, {len(broken)} broken", flush=True)
            if report.broken:
                broken.append(one.seed)
                _explain(one, report, shrinks=chosen.shrink)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print("sometimes: " + ", ".join(f"{name} {count}" for name, count in sorted(sometimes.items())))
    if chosen.brief:
        last = cases[-1].seed
        print(f"seeds {chosen.seed} to {last}: {events} events; broken: {', '.join(map(str, broken)) or 'none'}")
    return 1 if broken else 0


def _reports(cases: list[Case], jobs: int) -> Iterator[Report]:
    if jobs == 1 or len(cases) == 1:
        yield from map(Case.run, cases)
        return
    pool = ProcessPoolExecutor(jobs)
    try:
        yield from pool.map(Case.run, cases)
    finally:
        pool.shutdown(cancel_futures=True)


def _explain(case: Case, report: Report, *, shrinks: bool) -> None:
    if case.check_every != 1:  # an earlier event may tell more
        exact = replace(case, check_every=1)
        found = exact.run()
        if found.broken:
            case, report = exact, found
            print(f"    checked after each event: {report.broken}")
    print("\n".join(f"    {event}" for event in report.history))
    print(f"    replay: {case.command}", flush=True)
    if shrinks:
        smallest = shrink(case, report)
        print(f"    smallest: {smallest.command}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coppice sim",
        description="Run the three cores under faults, from seeds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=_whole, default=1, help="first seed")
    parser.add_argument("--runs", type=_positive, default=1, help="how many seeds, counted up from the first")
    parser.add_argument("--steps", type=_whole, default=DEFAULT_STEPS, help="events with faults, per seed")
    parser.add_argument("--profile", choices=PROFILES, default="random", help="which faults; random: from each seed")
    parser.add_argument(
        "--without", type=_kinds, default=(), help=f"comma-separated, of {', '.join((*SCOPES, *RATES, *WEATHER))}"
    )
    parser.add_argument(
        "--check-every",
        type=_positive,
        default=1,
        help="events between two checks of the cores: fewer checks, more seeds",
    )
    parser.add_argument("--jobs", type=_positive, default=1, help="processes that run seeds side by side")
    parser.add_argument("--brief", action="store_true", help="print what breaks, and how far it is, not every seed")
    parser.add_argument("--shrink", action="store_true", help="search the smallest run that breaks the same")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _kinds(text: str) -> tuple[str, ...]:
    kinds, known = tuple(text.split(",")), (*SCOPES, *RATES, *WEATHER)
    for kind in kinds:
        if kind not in known:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(known)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
