"""Settings of the core. Frozen, checked when they are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

from coppice.handles import BLOCKS_MAX
from coppice.ids import DomainId
from coppice_cache.core.base.errors import OpRefused, SettingsRefused

_UNLISTED_MAX = 4_096  # domains whose copy of the default is kept
_NS_PER_US = 1_000
_ROUNDING = 1e-9  # shares are decimal fractions; 0.3 + 0.7 must not exceed 1


def is_text(name: str) -> bool:
    """Whether it can be written as UTF-8. JSON can name half a character, which nothing behind us could say."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Eviction(Enum):
    ADAPTIVE = "adaptive"  # learns from each domain what is used again; see `hazard`
    LRU = "lru"


class Mode(Enum):
    STRICT = "strict"  # a fixed share, never lent, zeroed always
    PRIVATE = "private"  # a guarantee, and borrowing up to the maximum
    SHARED = "shared"  # like private, for the members of a group together
    DISABLED = "disabled"  # nothing is matched, nothing is published, zeroed always


@dataclass(frozen=True, slots=True)
class DomainConfig:
    """What a domain may hold on each worker: shares are fractions of its pool, blocks are numbers of them.

    A guarantee in both is the sum of them; of a maximum in both the lower counts. In strict mode the maximum is the
    guarantee.
    """

    domain: DomainId
    mode: Mode = Mode.PRIVATE
    guarantee_share: float = 0.0
    maximum_share: float = 1.0
    guarantee_blocks: int = 0
    maximum_blocks: int = 0  # 0: no maximum but the share
    zero_on_change: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.guarantee_share <= 1.0 or not 0.0 < self.maximum_share <= 1.0:
            raise SettingsRefused(f"domain {self.domain!r}: shares must lie between 0 and 1")
        if self.guarantee_blocks < 0 or self.maximum_blocks < 0:
            raise SettingsRefused(f"domain {self.domain!r}: numbers of blocks must not be negative")
        if self.guarantee_share > self.maximum_share:
            raise SettingsRefused(
                f"domain {self.domain!r}: guarantee_share {self.guarantee_share} is above maximum_share "
                f"{self.maximum_share}"
            )
        if self.maximum_blocks and self.guarantee_blocks > self.maximum_blocks:
            raise SettingsRefused(
                f"domain {self.domain!r}: guarantee_blocks {self.guarantee_blocks} is above maximum_blocks "
                f"{self.maximum_blocks}"
            )
        if self.mode is Mode.STRICT and self.guarantee_share == 0.0 and not self.guarantee_blocks:
            raise SettingsRefused(f"domain {self.domain!r}: strict mode needs a guarantee; it is all it ever gets")
        if self.mode is Mode.STRICT and (
            self.maximum_share not in (1.0, self.guarantee_share)
            or self.maximum_blocks not in (0, self.guarantee_blocks)
        ):
            raise SettingsRefused(f"domain {self.domain!r}: in strict mode the maximum must equal the guarantee")

    @property
    def wipes(self) -> bool:
        """Blocks of this domain must not pass to or from another one with their content."""
        return self.zero_on_change or self.mode in (Mode.STRICT, Mode.DISABLED)

    def by_shares(self) -> DomainConfig:
        """For the host's pool, which has another size: blocks are meant of the device. What wipes is never there, and
        keeps nobody else out."""
        if not self.wipes:
            return replace(self, guarantee_blocks=0, maximum_blocks=0)
        return DomainConfig(self.domain, zero_on_change=True)

    def guarantee_of(self, num_blocks: int) -> int:
        """Of a worker with so many blocks."""
        return int(self.guarantee_share * num_blocks + _ROUNDING) + self.guarantee_blocks

    def maximum_of(self, num_blocks: int) -> int:
        if self.mode is Mode.STRICT:
            return self.guarantee_of(num_blocks)
        maximum = int(self.maximum_share * num_blocks + _ROUNDING)
        return min(maximum, self.maximum_blocks) if self.maximum_blocks else maximum


@dataclass(frozen=True, slots=True)
class TierCosts:
    """What the decision between copying and computing again rests on, in microseconds.

    What is not fixed holds until a worker has said what it measured.
    """

    prefill_us_per_token: float = 20.0
    copy_us_per_block: float = 40.0  # one way
    order_us: float = 2_000.0  # until an order has reached the worker, its end is known and the prompt has asked again
    reuse_probability: float = 0.25  # of a prefix that nothing is known of
    demotion_weight: float = 1.0  # of a microsecond of copying down, which holds up promotions, against one of prefill
    is_prefill_fixed: bool = False
    is_copy_fixed: bool = False

    def measured(self, prefill_ns_per_token: int, copy_ns_per_block: int) -> TierCosts:
        """With what a worker measured; 0 leaves what is there."""
        prefill_us, copy_us = prefill_ns_per_token / _NS_PER_US, copy_ns_per_block / _NS_PER_US
        return replace(
            self,
            prefill_us_per_token=self.prefill_us_per_token if self.is_prefill_fixed or not prefill_us else prefill_us,
            copy_us_per_block=self.copy_us_per_block if self.is_copy_fixed or not copy_us else copy_us,
        )

    def is_worth_promoting(self, num_blocks: int, block_size: int, num_ahead: int) -> bool:
        """Whether the copy, behind `num_ahead` blocks that are copied first, is sooner there than the prefill."""
        return self.takes_us(num_blocks, num_ahead) < num_blocks * block_size * self.prefill_us_per_token

    def is_worth_demoting(self, num_blocks: int, block_size: int) -> bool:
        """Whether what a later hit saves, times its probability, exceeds the copy that is made now."""
        saved = num_blocks * (block_size * self.prefill_us_per_token - self.copy_us_per_block) - self.order_us
        return self.reuse_probability * saved > num_blocks * self.copy_us_per_block * self.demotion_weight

    def takes_us(self, num_blocks: int, num_ahead: int) -> float:
        """Until whoever asked for it has it."""
        return self.order_us + (num_ahead + num_blocks) * self.copy_us_per_block


COSTS_OF_A_DISK = TierCosts(copy_us_per_block=200.0, order_us=4_000.0, demotion_weight=0.1)


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Everything the core can be told. `default_domain` is the template for domains that are not listed."""

    seal_key: bytes  # 16 to 64 bytes
    previous_seal_keys: tuple[bytes, ...] = ()  # what was proved under them still counts
    domains: tuple[DomainConfig, ...] = ()
    default_domain: DomainConfig | None = None  # None: an unknown domain is Invalid
    session_ttl_ms: int = 10_000
    worker_ttl_ms: int = 10_000
    heartbeat_ms: int = 1_000
    ops_per_batch_max: int = 4_096
    tokens_max: int = 1 << 20  # per op, and as a reservation
    leases_per_session_max: int = 65_536
    sessions_max: int = 4_096
    eviction: Eviction = Eviction.ADAPTIVE
    workers_max: int = 4_096
    known_workers_max: int = 4_096  # ids that are remembered; beyond that no pool of before is taken over
    domains_per_worker_max: int = 65_536
    candidates_max: int = 1_024
    pins_max: int = 1_024  # an operator's
    flight_tokens_min: int = 32  # that must be on their way before a prompt waits for them
    flight_wait_ms: int = 2_000  # nobody waits longer for a leader
    tiers: TierCosts = TierCosts()
    disk_costs: TierCosts = COSTS_OF_A_DISK
    disk_rest_ms: int = 10_000  # without an order of a kind after one that failed: a full disk stays full for a while
    demote_below_share: float = 0.1  # of a pool: so many blocks, and as a burst takes, are free or one tier lower too
    set_aside_ms: int = 3_600_000  # that what a worker's disk had is remembered after its end
    set_aside_blocks_max: int = 1 << 21  # of all workers that are not here
    copy_orders_max: int = 64  # under way at once, per worker and direction
    demote_blocks_max: int = 1_024  # under way at once, per worker: they cannot be evicted meanwhile
    reclaim_grace_ms: int = 2_000  # that sessions have to give borrowed blocks back; then they are fenced
    blocks_per_worker_max: int = BLOCKS_MAX
    block_size_max: int = 1_024  # tokens
    name_bytes_max: int = 4_096  # of an id, a namespace, an address
    expiries_per_tick: int = 64
    nodes_dismantled_per_tick: int = 4_096
    record_events: bool = False  # tell of every change of the trees; somebody has to take the events then

    @property
    def seal_keys(self) -> tuple[bytes, ...]:
        """All that count, the present one first."""
        return (self.seal_key, *self.previous_seal_keys)

    def __post_init__(self) -> None:
        for key in self.seal_keys:
            if not 16 <= len(key) <= 64:
                raise SettingsRefused(f"a seal_key has {len(key)} bytes; it must have 16 to 64")
        positive = ("session_ttl_ms", "worker_ttl_ms", "heartbeat_ms", "ops_per_batch_max", "tokens_max")
        for name in (*positive, "reclaim_grace_ms"):
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
        default = self.default_domain
        if default is not None and (default.guarantee_share > 0.0 or default.guarantee_blocks):
            raise SettingsRefused("default_domain cannot have a guarantee: there is no bound on how many use it")


class Domains:
    """Configuration by domain."""

    def __init__(self, settings: CoreSettings) -> None:
        self._listed = {config.domain: config for config in settings.domains}
        self._default = settings.default_domain
        self._unlisted: dict[DomainId, DomainConfig] = {}  # lately asked for
        configs = [*settings.domains, *([settings.default_domain] if settings.default_domain else [])]
        self.any_wipes = any(config.wipes for config in configs)

    @property
    def listed(self) -> tuple[DomainConfig, ...]:
        return tuple(self._listed.values())

    def awaits(self, domain: DomainId) -> bool:
        """Whether it is not listed and could be soon: schedulers may hear of a new one before we do."""
        return self._default is None and domain not in self._listed and bool(domain) and is_text(domain)

    def misfit(self, num_blocks: int) -> str:
        """Why a pool of this size cannot keep what was promised in blocks (I13); empty when it can.

        Such a worker is refused. To cut the guarantees down to the pool would break every one of them on just this
        worker, and nobody would hear of it.
        """
        wanted = {config.domain: config.guarantee_of(num_blocks) for config in self._listed.values()}
        total = sum(wanted.values())
        if total > num_blocks:
            largest = sorted(wanted.items(), key=lambda item: -item[1])[:3]
            named = ", ".join(f"{domain} {blocks}" for domain, blocks in largest)
            return f"the guarantees of all domains sum to {total} blocks ({named}); this pool has {num_blocks}"
        for config in self._listed.values():
            guarantee, maximum = wanted[config.domain], config.maximum_of(num_blocks)
            if guarantee > maximum:
                return f"domain {config.domain}: of {num_blocks} blocks it is guaranteed {guarantee}, at most {maximum}"
        return ""

    def config(self, domain: DomainId) -> DomainConfig:
        """Raises OpRefused for a domain that is neither listed nor covered by a default."""
        found = self._listed.get(domain) or self._unlisted.get(domain)
        if found is not None:
            return found
        if self._default is None or not domain or domain.startswith("\0") or not is_text(domain):
            raise OpRefused(f"unknown domain {domain!r}")
        if len(self._unlisted) >= _UNLISTED_MAX:
            self._unlisted.clear()
        made = self._unlisted[domain] = replace(self._default, domain=domain)
        return made
