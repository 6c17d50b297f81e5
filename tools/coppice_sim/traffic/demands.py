"""What tenants, their requests and the operator want beside tokens: limits, weights, priorities, log-probabilities,
calls of tools, retention, salts, zeroing, invalidations, pins.

Drawn from a generator of its own, so that runs without any of it are what they were before it was there.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec

from coppice.ids import DomainId
from coppice.messages.reuse import Reuse
from coppice.messages.step import SamplingParams
from coppice.namespaces import digest_salt
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import Maximum, TenantLimits

_TOKENS = 1_000  # that a worker may say; in one answer of a hundred the one that opens calls
_USERS = ("", "user 1", "user 2")  # of each domain, by their salts


class Demands:
    """One run's share of it. Each kind is absent in some runs."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.rng = rng = Random(f"demands of {seed}")
        self._zeroing = rng.choice((0.0, 0.0, 0.3, 0.6))
        self._passes_maximums = rng.random() < 0.7
        self._limits = rng.random() < 0.6
        self._logprobs = rng.choice((0.0, 0.2, 0.6))
        self._prompt_logprobs = rng.choice((0.0, 0.0, 0.2))
        self._priorities = rng.choice((1, 1, 3))
        self._retention = rng.choice((0.0, 0.0, 0.3))
        self._hints = rng.choice((0.0, 0.3))
        self.operator_rate = rng.choice((0.0, 0.0, 1.0, 5.0))  # acts per second of virtual time
        self._reporting = Random(f"log-probabilities of {seed}")
        self._salting = Random(f"salts of {seed}")
        self._has_salts = self._salting.random() < 0.25
        self._calling = Random(f"calls of tools of {seed}")
        self._has_tools = self._calling.random() < 0.5
        self._salt_of: dict[str, bytes] = {}  # by request

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
        if self.rng.random() < self._zeroing:
            config = replace(config, zero_on_change=True)
        if not config.guarantee_share and self.rng.random() < 0.2:
            config = replace(config, maximum_blocks=self.rng.choice((8, 16)))
        return config

    def queue_sizes(self) -> tuple[int, int]:
        """Requests and tokens that may wait in a scheduler: in some runs so few that some are refused."""
        rng = Random(f"queue of {self._seed}")
        return rng.choice((40, 40, 40, 40, 12)), rng.choice((1 << 22, 1 << 22, 1 << 22, 1 << 22, 500))

    def quarantine_ms(self) -> int:
        """That prompts are refused with which workers were lost. Most runs are shorter, and have few prompts."""
        return Random(f"quarantine of {self._seed}").choice((0, 300, 300_000))

    def max_retries(self) -> int:
        """Times that a request goes on after a fault."""
        return Random(f"retries of {self._seed}").choice((0, 1, 3, 3))

    def limits(self, domains: tuple[DomainConfig, ...]) -> dict[str, TenantLimits]:
        """Of each tenant in a scheduler; the same for all schedulers of a run."""
        if not self._limits:
            return {}
        rng = Random(f"limits of {self._seed}")
        return {
            config.domain: TenantLimits(
                max_concurrency=rng.choice((256, 256, 12)),
                max_queued=rng.choice((256, 256, 6)),
                weight=rng.choice((1.0, 0.5, 3.0)),
                requests_per_minute=rng.choice((0, 0, 0, 600)),
                tokens_per_minute=rng.choice((0, 0, 0, 20_000)),
                is_strict=config.mode is Mode.STRICT,
            )
            for config in domains
        }

    def maximums(self, domains: tuple[DomainConfig, ...]) -> dict[DomainId, Maximum]:
        """As the service reads them from the tenants file, for its scheduler."""
        if not self._passes_maximums:
            return {}
        return {config.domain: Maximum(config.maximum_share, config.maximum_blocks) for config in domains}

    # -- what a request wants

    def wanted(self, request: Request) -> Request:
        rng, sampling = self.rng, request.sampling
        if rng.random() < self._logprobs:
            sampling = msgspec.structs.replace(sampling, num_logprobs=rng.choice((0, 1, 3)))
            if request.fork_of is None and rng.random() < self._prompt_logprobs:
                sampling = self._of_the_prompt(sampling)
        return msgspec.structs.replace(
            request,
            salt=self._salt(request),
            sampling=sampling,
            priority=rng.randrange(self._priorities),
            reuse=rng.choice(tuple(Reuse)) if rng.random() < self._hints else request.reuse,
            call_opens=self._calling.randrange(_TOKENS) if self._has_tools else None,
            retain_ms=rng.choice((50, 2_000)) if rng.random() < self._retention else 0,
        )

    def _of_the_prompt(self, sampling: SamplingParams) -> SamplingParams:
        """Sometimes as many as of the output, sometimes others, sometimes none of the output."""
        num_output, num_prompt = self._reporting.choice(
            ((sampling.num_logprobs, sampling.num_logprobs), (sampling.num_logprobs, 2), (None, 1))
        )
        return msgspec.structs.replace(sampling, num_logprobs=num_output, num_prompt_logprobs=num_prompt)

    def _salt(self, request: Request) -> bytes:
        """A fork that has another one than its leader, by mistake or not, is none."""
        rng = self._salting
        if not self._has_salts:
            return b""
        salt = self._salt_of.get(request.fork_of or "")
        if salt is None or rng.random() < 0.3:
            user = rng.choice(_USERS)
            salt = digest_salt(request.domain, user) if user else b""
        self._salt_of[request.request_id] = salt
        return salt
