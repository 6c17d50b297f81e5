"""The seal keys that an operator gives the cache service: now and then another one when it starts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from coppice_cache.core.base.settings import CoreSettings
from coppice_sim.base.environment import Environment

ROTATED = 0.3  # share of the starts


class SealKeys:
    """One for the world: it outlives the services."""

    def __init__(self, env: Environment) -> None:
        self._sometimes = env.record.sometimes
        self._rng = Random(f"seal keys of {env.seed}")  # of its own: what else happens in a run does not depend on it
        self._keys: tuple[bytes, ...] = ()  # the present one first

    def service_starts(self) -> None:
        if not self._keys or self._rng.random() < ROTATED:
            self._sometimes["seal key rotated"] += bool(self._keys)
            self._keys = (b"seal key %d of the simulation" % len(self._keys), *self._keys)

    def in_settings(self, settings: CoreSettings) -> CoreSettings:
        return replace(settings, seal_key=self._keys[0], previous_seal_keys=self._keys[1:])
