"""What an operator decides about scheduling. Frozen, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from coppice.ids import DomainId
from coppice.messages.index import RETAIN_PRIORITY_MAX

INSTANCE_BYTES = 8
DECODE_STEPS_MAX = 128  # of one plan


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Ceilings of one tenant in this scheduler."""

    max_concurrency: int = 256  # requests, running and waiting together
    max_queued: int = 256  # requests that found no place and wait for one
    weight: float = 1.0  # share of the service when several tenants want more than there is
    requests_per_minute: int = 0  # 0 = no limit
    tokens_per_minute: int = 0  # prompt and output together; 0 = no limit
    is_strict: bool = False  # what it is answered depends on no other tenant, and no other's answer on it


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What a domain may always hold on each worker: a share of its blocks, and a number of them."""

    share: float = 0.0
    blocks: int = 0

    def of(self, num_blocks: int) -> int:
        return int(self.share * num_blocks + 1e-9) + self.blocks


@dataclass(frozen=True, slots=True)
class Maximum:
    """What a domain may hold on each worker at most: a share of its blocks, and a number of them where it is not 0."""

    share: float = 1.0
    blocks: int = 0

    def of(self, num_blocks: int) -> int:
        by_share = int(self.share * num_blocks + 1e-9)
        return min(by_share, self.blocks) if self.blocks else by_share


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What the tenants file says. It may change while a scheduler runs; all else stays."""

    limits: Mapping[str, TenantLimits]
    domains: Mapping[str, DomainId]  # of each tenant; whoever is not there, or elsewhere, is not served
    fixed_domains: frozenset[DomainId]
    guarantees: Mapping[DomainId, Guarantee]
    maximums: Mapping[DomainId, Maximum]


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Ceilings and sizes of one scheduler. Raises ValueError, naming the field, on values that cannot work."""

    instance: bytes  # 8 random bytes: the first half of every lease id, the second half counts
    max_step_tokens: int = 2048  # tokens that one step of one worker computes
    max_running: int = 256  # requests that hold memory, over all workers
    max_chunk_tokens: int = 1024  # tokens of one sequence in one step
    contested_prefill_tokens: int = 512  # prefill of one step while several tenants wait for a first token
    max_overtake_ms: int = 2000  # a request is overtaken, within its tenant, by what comes within this time at most
    match_window: int = 32  # waiting requests of a tenant whose matches are asked for; 0: first come first served
    max_queued: int = 1024  # requests that wait, of all tenants; `policy/queue_room.py` shares it out
    max_queued_tokens: int = 4_194_304  # of prompts that wait, shared out likewise
    queue_timeout_ms: int = 60_000
    max_steps_in_flight: int = 2  # plans without a result, per worker
    max_decode_steps: int = 8  # that one plan may hold while nobody waits; 1: a plan is one step
    decode_burst_ms: float = 10.0  # that such a plan may take
    max_context: int = 32_768  # tokens of one sequence, prompt and output together
    extend_ahead_blocks: int = 1  # blocks owned beyond the next token's
    extend_more_blocks: int = 3  # asked for at once beyond that, so that it is asked for less often
    max_retries: int = 3  # times that one request goes on elsewhere, or once more, after a fault that is not its own
    quarantine_ms: int = 300_000  # that a prompt is refused with which two workers were lost; 0: never
    worker_absent_ms: int = 30_000  # without a connection for so long, a worker's requests are taken from it
    single_flight_wait_ms: int = 10_000  # that a request waits for others to compute its prefix; 0: it never does
    retain_priority: int = 50  # of prompts that a client asked to keep: they are evicted after those of a lower one
    tenants: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))
    default_limits: TenantLimits = TenantLimits()
    fixed_domains: frozenset[DomainId] = (
        frozenset()
    )  # strict: their share is theirs alone, others' shortage is not theirs
    guarantees: Mapping[DomainId, Guarantee] = field(default_factory=lambda: MappingProxyType({}))
    maximums: Mapping[DomainId, Maximum] = field(default_factory=lambda: MappingProxyType({}))
    domains: Mapping[str, DomainId] | None = None  # of each tenant; None: whoever comes is served

    def __post_init__(self) -> None:
        if len(self.instance) != INSTANCE_BYTES:
            raise ValueError(f"instance must have {INSTANCE_BYTES} bytes, not {len(self.instance)}")
        for name in (
            "max_step_tokens",
            "max_running",
            "max_chunk_tokens",
            "contested_prefill_tokens",
            "max_queued",
            "max_queued_tokens",
            "queue_timeout_ms",
            "max_steps_in_flight",
            "max_decode_steps",
            "max_context",
            "worker_absent_ms",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_decode_steps > DECODE_STEPS_MAX:
            raise ValueError(f"max_decode_steps must be at most {DECODE_STEPS_MAX}, not {self.max_decode_steps}")
        if self.max_overtake_ms < 0 or self.match_window < 0:
            raise ValueError("max_overtake_ms and match_window must not be negative")
        for name in (
            "extend_ahead_blocks",
            "extend_more_blocks",
            "max_retries",
            "single_flight_wait_ms",
            "quarantine_ms",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if not 0 < self.retain_priority <= RETAIN_PRIORITY_MAX:
            raise ValueError(
                f"retain_priority must lie between 1 and {RETAIN_PRIORITY_MAX}, not {self.retain_priority}"
            )
        if self.decode_burst_ms < 0:
            raise ValueError(f"decode_burst_ms must not be negative, not {self.decode_burst_ms}")
        if self.max_running > self.max_step_tokens:
            raise ValueError(
                f"max_running ({self.max_running}) must not exceed max_step_tokens ({self.max_step_tokens}): "
                "every running request needs one token of a step to decode"
            )

    def with_tenants(self, tenants: TenantSettings) -> SchedulerSettings:
        return replace(
            self,
            tenants=tenants.limits,
            domains=tenants.domains,
            fixed_domains=tenants.fixed_domains,
            guarantees=tenants.guarantees,
            maximums=tenants.maximums,
        )

    def serves(self, tenant: str, domain: DomainId) -> bool:
        return self.domains is None or self.domains.get(tenant) == domain

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.tenants.get(tenant, self.default_limits)
