"""The registry of cache epochs: it outlives the cache services, and now and then forgets."""

from __future__ import annotations

from random import Random

from coppice.handles import ERA_EPOCHS
from coppice.ids import CacheEpoch
from coppice_sim.base.environment import Environment


class EpochRegistry:
    def __init__(self, env: Environment, forgets: float) -> None:
        self._env = env
        self._forgets = forgets  # probability that a restarted cache service finds no counter
        self._first = Random(f"era of {env.seed}").choice((1, 1, 1, ERA_EPOCHS - 1))
        self._incarnations = 0
        self.given: list[CacheEpoch] = []

    def next_epoch(self) -> CacheEpoch:
        """What the registry remembers; now and then it has lost it, and the workers must tell (rule 9)."""
        if not self.given or self._env.rng.random() < self._forgets:
            self._env.record.sometimes["epoch forgotten"] += bool(self.given)
            return CacheEpoch(self._first)
        return CacheEpoch(max(self.given) + 1)

    def begin(self, epoch: CacheEpoch) -> Random:
        """A core starts under it, with a generator of its own: what else happens in a run does not depend on it."""
        if epoch > self._first + len(self.given):
            self._env.record.fail("rule 9", f"cache epoch {epoch} after {self.given}: nobody gave out that many")
        self.given.append(epoch)
        return Random(f"epochs of {self._env.seed}, {len(self.given)}")

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations
