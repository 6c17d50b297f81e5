"""Settings of the core. Frozen, checked when they are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

from coppice.handles import BLOCKS_MAX
from coppice.ids import DomainId
from coppice_cache.core.errors import OpRefused, SettingsRefused

_ROUNDING = 1e-9  # shares are decimal fractions; 0.3 + 0.7 must not exceed 1


class Mode(Enum):
    STRICT = "strict"  # a fixed share, never lent, zeroed always
    PRIVATE = "private"  # a guarantee, and borrowing up to the maximum
    SHARED = "shared"  # like private, for the members of a group together
    DISABLED = "disabled"  # nothing is matched, nothing is published


@dataclass(frozen=True, slots=True)
class DomainConfig:
    """Shares are fractions of each worker's pool. In strict mode the maximum is the guarantee."""

    domain: DomainId
    mode: Mode = Mode.PRIVATE
    guarantee_share: float = 0.0
    maximum_share: float = 1.0
    zero_on_change: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.guarantee_share <= 1.0 or not 0.0 < self.maximum_share <= 1.0:
            raise SettingsRefused(f"domain {self.domain!r}: shares must lie between 0 and 1")
        if self.guarantee_share > self.maximum_share:
            raise SettingsRefused(
                f"domain {self.domain!r}: guarantee_share {self.guarantee_share} is above maximum_share "
                f"{self.maximum_share}"
            )
        if self.mode is Mode.STRICT and self.guarantee_share == 0.0:
            raise SettingsRefused(
                f"domain {self.domain!r}: strict mode needs a guarantee_share; it is all it ever gets"
            )
        if self.mode is Mode.STRICT and self.maximum_share not in (1.0, self.guarantee_share):
            raise SettingsRefused(f"domain {self.domain!r}: in strict mode maximum_share must equal guarantee_share")

    @property
    def wipes(self) -> bool:
        """Blocks of this domain must not pass to or from another one with their content."""
        return self.zero_on_change or self.mode is Mode.STRICT

    def guarantee_blocks(self, num_blocks: int) -> int:
        return int(self.guarantee_share * num_blocks + _ROUNDING)

    def maximum_blocks(self, num_blocks: int) -> int:
        if self.mode is Mode.STRICT:
            return self.guarantee_blocks(num_blocks)
        return int(self.maximum_share * num_blocks + _ROUNDING)


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Everything the core can be told. `default_domain` is the template for domains that are not listed."""

    seal_key: bytes  # 16 to 64 bytes
    domains: tuple[DomainConfig, ...] = ()
    default_domain: DomainConfig | None = None  # None: an unknown domain is Invalid
    session_ttl_ms: int = 10_000
    worker_ttl_ms: int = 10_000
    heartbeat_ms: int = 1_000
    ops_per_batch_max: int = 4_096
    tokens_max: int = 1 << 20  # per op, and as a reservation
    leases_per_session_max: int = 65_536
    sessions_max: int = 4_096
    workers_max: int = 4_096
    domains_per_worker_max: int = 65_536
    candidates_max: int = 1_024
    blocks_per_worker_max: int = BLOCKS_MAX
    block_size_max: int = 1_024  # tokens
    name_bytes_max: int = 4_096  # of an id, a namespace, an address
    expiries_per_tick: int = 64
    nodes_dismantled_per_tick: int = 4_096

    def __post_init__(self) -> None:
        if not 16 <= len(self.seal_key) <= 64:
            raise SettingsRefused(f"seal_key has {len(self.seal_key)} bytes; it must have 16 to 64")
        for name in ("session_ttl_ms", "worker_ttl_ms", "heartbeat_ms", "ops_per_batch_max", "tokens_max"):
            if getattr(self, name) <= 0:
                raise SettingsRefused(f"{name} must be positive")
        if self.heartbeat_ms >= min(self.session_ttl_ms, self.worker_ttl_ms):
            raise SettingsRefused("heartbeat_ms must be below session_ttl_ms and worker_ttl_ms")
        counted = Counter(config.domain for config in self.domains)
        if doubled := [domain for domain, count in counted.items() if count > 1]:
            raise SettingsRefused(f"domain {doubled[0]!r} is listed twice")
        total = sum(config.guarantee_share for config in self.domains)
        if total > 1.0 + _ROUNDING:
            raise SettingsRefused(f"the guarantees of all domains sum to {total:.3f}; at most 1 can be given")
        if self.default_domain is not None and self.default_domain.guarantee_share > 0.0:
            raise SettingsRefused("default_domain cannot have a guarantee: there is no bound on how many use it")


class Domains:
    """Configuration by domain."""

    def __init__(self, settings: CoreSettings) -> None:
        self._listed = {config.domain: config for config in settings.domains}
        self._default = settings.default_domain
        configs = [*settings.domains, *([settings.default_domain] if settings.default_domain else [])]
        self.any_wipes = any(config.wipes for config in configs)

    @property
    def listed(self) -> tuple[DomainConfig, ...]:
        return tuple(self._listed.values())

    def config(self, domain: DomainId) -> DomainConfig:
        """Raises OpRefused for a domain that is neither listed nor covered by a default."""
        found = self._listed.get(domain)
        if found is not None:
            return found
        if self._default is None or not domain or domain.startswith("\0"):
            raise OpRefused(f"unknown domain {domain!r}")
        return replace(self._default, domain=domain)
