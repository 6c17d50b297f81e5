"""What the operator does while the cluster runs: invalidates, pins, unpins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from coppice.ids import DomainId
from coppice_cache.core.base.errors import MessageRefused
from coppice_sim.base.environment import Environment
from coppice_sim.base.names import NAMESPACE
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.cluster import Cluster

_PINS = 3  # names that the operator uses


@dataclass
class Operator:
    env: Environment
    rng: Random
    rate: float  # acts per second of virtual time
    cluster: Cluster
    domains: tuple[str, ...]
    prompt: Callable[[Random, str], list[int]]  # tokens of one that clients of a domain use
    is_over: bool = False

    def __post_init__(self) -> None:
        if self.rate:
            self._next_act()

    def end(self) -> None:
        """Nothing is forgotten or pinned from now on; pins go, or they would never."""
        self.is_over = True
        cache = self.cluster.cache
        if cache.is_alive:
            for number in range(_PINS):
                cache.core.unpin(f"pin {number}", cache.now_ns)
            cache.carry_out()

    def _next_act(self) -> None:
        def act() -> None:
            if not self.is_over:
                if self.cluster.cache.is_alive and not self.cluster.cache.is_paused:
                    self._act()
                self._next_act()

        self.env.timeline.after(int(self.rng.expovariate(self.rate) * 1000 * MS) + 1, act)

    def _act(self) -> None:
        rng, cache, sometimes = self.rng, self.cluster.cache, self.env.record.sometimes
        core, now_ns = cache.core, cache.now_ns
        domain, name = DomainId(rng.choice(self.domains)), f"pin {rng.randrange(_PINS)}"
        prompt = np.array(self.prompt(rng, domain), "<u4").tobytes()
        match rng.randrange(6):
            case 0:
                namespace = rng.choice((NAMESPACE, None))
                core.invalidate(domain=rng.choice((domain, None)), namespace=namespace, now_ns=now_ns)
                sometimes["invalidated"] += 1
            case 1 | 2:
                core.invalidate(domain=domain, namespace=NAMESPACE, tokens=prompt, now_ns=now_ns)
                sometimes["prefix invalidated"] += 1
            case 3 | 4:
                core.unpin(name, now_ns)
                try:
                    sometimes["pinned"] += core.pin(name, domain, NAMESPACE, prompt, now_ns) > 0
                except MessageRefused:
                    sometimes["pin refused"] += 1
            case _:
                core.unpin(name, now_ns)
        cache.carry_out()
