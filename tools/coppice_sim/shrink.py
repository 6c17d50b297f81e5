"""Make a broken run smaller: fewer kinds of trouble, fewer events, and still the same invariant breaks.

A kind of trouble that is taken away changes all that is drawn after it, so each attempt is a run of its own and may be
lucky or not. The events before the faults end are the same for every number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from coppice_sim.nemesis import PROFILES, FaultProfile
from coppice_sim.run import Report, run
from coppice_sim.world import WHOLE, Scope, World

SCOPES = ("disks", "tiers", "demands")  # may be taken away like kinds of trouble


@dataclass(frozen=True, slots=True)
class Case:
    """A run by the words of the command line."""

    seed: int
    steps: int
    profile: str = "random"
    without: tuple[str, ...] = ()
    check_every: int = 1

    def run(self) -> Report:
        scope, faults = self._scope(), PROFILES[self.profile]()
        trouble = [kind for kind in self.without if kind not in SCOPES]
        if trouble:
            faults = faults or faults_of(self.seed)
            for kind in trouble:
                faults = faults.without(kind)
        return run(self.seed, steps=self.steps, faults=faults, scope=scope)

    @property
    def command(self) -> str:
        words = [f"coppice sim --seed {self.seed} --steps {self.steps}"]
        if self.profile != "random":
            words.append(f"--profile {self.profile}")
        if self.without:
            words.append(f"--without {','.join(self.without)}")
        if self.check_every != 1:
            words.append(f"--check-every {self.check_every}")
        return " ".join(words)

    def _scope(self) -> Scope:
        scope = replace(WHOLE, check_every=self.check_every)
        for kind in self.without:
            if kind in SCOPES:
                scope = replace(scope, **{kind: False})  # type: ignore[arg-type]
        return scope


def faults_of(seed: int) -> FaultProfile:
    """What a run of this seed draws."""
    return World(seed).faults


def shrink(case: Case, report: Report, *, runs_max: int = 200, said: Callable[[str], None] = print) -> Case:
    """The smallest case that was found in so many runs. `report` is of the case; the name of what it breaks counts."""
    name = name_of(report.broken)
    left = runs_max
    while True:
        for smaller in _smaller(case, report):
            if not left:
                return case
            left -= 1
            found = smaller.run()
            if name_of(found.broken) == name:
                case, report = replace(smaller, steps=min(smaller.steps, found.events)), found
                said(f"    smaller: {case.command}")
                break
        else:
            return case


def _smaller(case: Case, report: Report) -> Iterator[Case]:
    """What to try, the most promising first."""
    for steps in (case.steps // 4, case.steps // 2):
        if steps < case.steps:
            yield replace(case, steps=steps)
    for kind in (*SCOPES, *report.faults.kinds()):
        if kind not in case.without:
            yield replace(case, without=(*case.without, kind))
    if case.steps * 9 // 10 < case.steps:
        yield replace(case, steps=case.steps * 9 // 10)


def name_of(broken: str) -> str:
    """The invariant, or the kind of error."""
    return broken.partition(":")[0]
