"""What tenants, their requests and the operator want beside tokens: limits, weights, priorities, log-probabilities,
retention, zeroing, invalidations, pins.

Drawn from a generator of its own, so that runs without any of it are what they were before it was there.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from coppice.ids import DomainId
from coppice.messages.index import Reuse
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import Maximum, TenantLimits
from coppice_sim.base.names import NAMESPACE
from coppice_sim.base.timeline import MS

if TYPE_CHECKING:
    from coppice_sim.world import World

_PINS = 3  # names that the operator uses


class Demands:
    """One run's share of it. Each kind is absent in some runs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = rng = Random(f"demands of {seed}")
        self._zeroing = rng.choice((0.0, 0.0, 0.3, 0.6))
        self._passes_maximums = rng.random() < 0.7
        self._limits = rng.random() < 0.6
        self._logprobs = rng.choice((0.0, 0.2, 0.6))
        self._prompt_logprobs = rng.choice((0.0, 0.0, 0.2))
        self._priorities = rng.choice((1, 1, 3))
        self._retention = rng.choice((0.0, 0.0, 0.3))
        self._hints = rng.choice((0.0, 0.3))
        self._operator = rng.choice((0.0, 0.0, 1.0, 5.0))  # acts per second of virtual time
        self._is_over = False

    # -- what is configured

    def configured(self, index: CoreSettings) -> CoreSettings:
        """Some private domains ask for zeroing, some may hold so many blocks and no more. What was invalidated is taken
        apart at once, or slowly."""
        domains = tuple(self._configured(config) for config in index.domains)
        sweeps = Random(f"sweeps of {self._seed}").choice((1, 3, index.nodes_dismantled_per_tick))
        return replace(index, domains=domains, nodes_dismantled_per_tick=sweeps)

    def _configured(self, config: DomainConfig) -> DomainConfig:
        if config.mode is not Mode.PRIVATE:
            return config
        if self._rng.random() < self._zeroing:
            config = replace(config, zero_on_change=True)
        if not config.guarantee_share and self._rng.random() < 0.2:
            config = replace(config, maximum_blocks=self._rng.choice((8, 16)))
        return config

    def limits(self, domains: tuple[str, ...]) -> dict[str, TenantLimits]:
        """Of each tenant in a scheduler; the same for all schedulers of a run."""
        if not self._limits:
            return {}
        rng = Random(f"limits of {self._seed}")
        return {
            domain: TenantLimits(
                max_concurrency=rng.choice((256, 256, 12)),
                max_queued=rng.choice((256, 256, 6)),
                weight=rng.choice((1.0, 0.5, 3.0)),
                requests_per_minute=rng.choice((0, 0, 0, 600)),
                tokens_per_minute=rng.choice((0, 0, 0, 20_000)),
            )
            for domain in domains
        }

    def maximums(self, domains: tuple[DomainConfig, ...]) -> dict[DomainId, Maximum]:
        """As the service reads them from the tenants file, for its scheduler."""
        if not self._passes_maximums:
            return {}
        return {config.domain: Maximum(config.maximum_share, config.maximum_blocks) for config in domains}

    # -- what a request wants

    def wanted(self, request: Request) -> Request:
        rng, sampling = self._rng, request.sampling
        if rng.random() < self._logprobs:
            sampling = replace(sampling, num_logprobs=rng.choice((0, 1, 3)))
            if request.fork_of is None and rng.random() < self._prompt_logprobs:
                sampling = replace(sampling, prompt_logprobs=True)
        return replace(
            request,
            sampling=sampling,
            priority=rng.randrange(self._priorities),
            reuse=rng.choice(tuple(Reuse)) if rng.random() < self._hints else request.reuse,
            retain_ms=rng.choice((50, 2_000)) if rng.random() < self._retention else 0,
        )

    # -- what the operator does

    def begin(self, world: World) -> None:
        if self._operator:
            self._next_act(world)

    def end(self, world: World) -> None:
        """Nothing is forgotten or pinned from now on; pins go, or they would never."""
        self._is_over = True
        if world.cache.is_alive:
            for number in range(_PINS):
                world.cache.core.unpin(f"pin {number}", world.timeline.now_ns)
            world.cache.carry_out()

    def _next_act(self, world: World) -> None:
        def act() -> None:
            if not self._is_over:
                if world.cache.is_alive and not world.cache.is_paused:
                    self._act(world)
                self._next_act(world)

        world.timeline.after(int(self._rng.expovariate(self._operator) * 1000 * MS) + 1, act)

    def _act(self, world: World) -> None:
        rng, core, now_ns = self._rng, world.cache.core, world.timeline.now_ns
        domain, name = DomainId(rng.choice(world.settings.domains)), f"pin {rng.randrange(_PINS)}"
        prompt = np.array(world.workload.a_prompt(rng), "<u4").tobytes()
        match rng.randrange(6):
            case 0:
                namespace = rng.choice((NAMESPACE, None))
                core.invalidate(domain=rng.choice((domain, None)), namespace=namespace, now_ns=now_ns)
                world.sometimes["invalidated"] += 1
            case 1 | 2:
                core.invalidate(domain=domain, namespace=NAMESPACE, tokens=prompt, now_ns=now_ns)
                world.sometimes["prefix invalidated"] += 1
            case 3 | 4:
                core.unpin(name, now_ns)
                try:
                    world.sometimes["pinned"] += core.pin(name, domain, NAMESPACE, prompt, now_ns) > 0
                except MessageRefused:
                    world.sometimes["pin refused"] += 1
            case _:
                core.unpin(name, now_ns)
        world.cache.carry_out()
