"""What every process of a run stands on, and what the run remembers of itself."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import NoReturn

from coppice_sim.base.network import Network
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS, Timeline


class BrokenInvariantError(Exception):
    """An invariant does not hold. `name` is its number in the design, or a word."""

    def __init__(self, name: str, evidence: str) -> None:
        super().__init__(f"{name}: {evidence}")
        self.name = name


class Record:
    """What has happened in a run."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.sometimes: Counter[str] = Counter()
        self.internal_errors: list[str] = []
        self.history: deque[str] = deque(maxlen=40)
        self.touched: set[Process] = set()  # by the present event

    def trace(self, what: str) -> None:
        self.history.append(f"{self._timeline.now_ns / MS:10.2f} ms  {what}")

    def fail(self, name: str, evidence: str) -> NoReturn:
        raise BrokenInvariantError(name, evidence)


@dataclass(frozen=True, slots=True)
class Environment:
    seed: int
    timeline: Timeline
    rng: Random
    network: Network
    record: Record
    vocabulary: int  # tokens that the model may say
    doubled_bodies: float = 0.0  # probability that a core is given the same message again
