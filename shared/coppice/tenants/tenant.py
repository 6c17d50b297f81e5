"""One tenant, and the domain that its prefixes are shared within."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from coppice.ids import DomainId
from coppice.settings import nearest
from coppice.tenants.keys import ApiKeys

_MODES = ("private", "strict", "disabled")

ModeName = Literal["private", "strict", "disabled", "shared"]
MIN_CONTEXT = 2  # a prompt has one token at least, and so has its answer
Models = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})
]


class SharedMode(BaseModel):
    """`mode: {shared: GROUP}`: prefixes are shared with all tenants that name the same group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


class Tenant(BaseModel):
    """One entry of `tenants:`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    api_key_sha256: ApiKeys = Field(repr=False)
    mode: Literal["private", "strict", "disabled"] | SharedMode = "private"
    guarantee_share: float = Field(0.0, ge=0, le=1)  # of each worker's blocks, always available
    guarantee_blocks: int = Field(0, ge=0)  # the same as a number; one of the two
    max_share: float = Field(1.0, gt=0, le=1)  # of each worker's blocks, at most
    max_blocks: int = Field(0, ge=0)  # the same as a number, 0: none; of both the lower counts
    concurrency: int = Field(256, ge=1)  # requests, running and waiting together
    max_queued: int = Field(256, ge=1)  # requests that found no place and wait for one
    weight: float = Field(1.0, gt=0, le=1000)  # share of the service when several want more than there is
    requests_per_minute: int = Field(0, ge=0)  # 0: no limit
    tokens_per_minute: int = Field(0, ge=0)  # prompt and output together; 0: no limit
    tokens_per_month: int = Field(0, ge=0)  # prompt and output together, by UTC months; then it is refused; 0: no limit
    soft_tokens_per_month: int = Field(0, ge=0)  # from here on the log says so; 0: nothing is said
    zero_on_change: bool = False  # blocks are zeroed between this domain and others; always so if strict or disabled
    models: Models | None = None  # that it may ask for, by name; None: all that are served
    max_context: int | None = Field(None, ge=MIN_CONTEXT)  # tokens of prompt and output together; the service's caps it
    max_retain_ms: int | None = Field(None, ge=0)  # that it may ask to keep a prompt; the service's caps it, 0: never
    shows_cached_tokens: bool = True  # its usage tells how much of a prompt was found, and how much can be found now

    @field_validator("mode", mode="before")
    @classmethod
    def _known_mode(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in _MODES:
            hint = "write mode: {shared: GROUP}" if value == "shared" else nearest(value, [*_MODES, "shared"])
            raise ValueError(f"{value!r} is no mode; {hint}")
        return value

    @field_validator("models")
    @classmethod
    def _models_differ(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        twice = [name for at, name in enumerate(names or ()) if name in (names or ())[:at]]
        if twice:
            raise ValueError(f"{twice[0]!r} is named twice")
        return names

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        names = [key.name for key in self.api_key_sha256 if key.name]
        if len(set(names)) != len(names):
            raise ValueError(f"tenant {self.id!r} has two API keys of one name")
        if len({key.sha256 for key in self.api_key_sha256}) != len(self.api_key_sha256):
            raise ValueError(f"tenant {self.id!r} names one API key twice")
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.guarantee_share and self.guarantee_blocks:
            raise ValueError("give guarantee_share or guarantee_blocks, not both")
        if (
            self.mode in ("strict", "disabled")
            and not self.zero_on_change
            and "zero_on_change" in self.model_fields_set
        ):
            raise ValueError(f"mode {self.mode} always zeroes: leave zero_on_change out")
        if self.tokens_per_month and self.soft_tokens_per_month > self.tokens_per_month:
            raise ValueError(
                f"soft_tokens_per_month ({self.soft_tokens_per_month}) is above "
                f"tokens_per_month ({self.tokens_per_month})"
            )
        if self.mode == "strict":
            self._is_fixed()
        if self.guarantee_share > self.max_share:
            raise ValueError(f"guarantee_share ({self.guarantee_share}) is above max_share ({self.max_share})")
        if self.max_blocks and self.guarantee_blocks > self.max_blocks:
            raise ValueError(f"guarantee_blocks ({self.guarantee_blocks}) is above max_blocks ({self.max_blocks})")
        return self

    def _is_fixed(self) -> None:
        given = self.model_fields_set
        if not self.guarantee_share and not self.guarantee_blocks:
            raise ValueError("mode strict needs guarantee_share or guarantee_blocks above 0: its memory is fixed")
        if "max_share" in given and self.max_share != self.guarantee_share:
            raise ValueError(
                f"mode strict never borrows: max_share ({self.max_share}) must equal "
                f"guarantee_share ({self.guarantee_share}) or be left out"
            )
        if "max_blocks" in given and self.max_blocks != self.guarantee_blocks:
            raise ValueError(
                f"mode strict never borrows: max_blocks ({self.max_blocks}) must equal "
                f"guarantee_blocks ({self.guarantee_blocks}) or be left out"
            )
        object.__setattr__(self, "max_share", self.guarantee_share or 1.0)
        object.__setattr__(self, "max_blocks", self.guarantee_blocks)

    @property
    def has_budget(self) -> bool:
        return bool(self.tokens_per_month or self.soft_tokens_per_month)

    @property
    def mode_name(self) -> ModeName:
        return "shared" if isinstance(self.mode, SharedMode) else self.mode

    @property
    def domain(self) -> DomainId:
        """What this tenant's prefixes are shared within. The two forms cannot collide."""
        if isinstance(self.mode, SharedMode):
            return DomainId(f"group/{self.mode.shared}")
        return DomainId(f"tenant/{self.id}")


@dataclass(frozen=True, slots=True)
class DomainShares:
    """One domain, in the cache service's words. Shares are fractions of each worker's blocks.

    A guarantee is the share and the blocks together; the lower of both maxima counts, and 0 blocks is no maximum.
    """

    domain: DomainId
    mode: ModeName
    guarantee_share: float
    maximum_share: float
    guarantee_blocks: int = 0
    maximum_blocks: int = 0
    zero_on_change: bool = False


def domain_shares(tenants: Iterable[Tenant]) -> tuple[DomainShares, ...]:
    """The domains of `tenants`, in their order. A group's guarantees add up, its maximum is its members'
    largest, and one member that asks for zeroing is enough."""
    found: dict[DomainId, DomainShares] = {}
    for tenant in tenants:
        before = found.get(tenant.domain)
        found[tenant.domain] = DomainShares(
            domain=tenant.domain,
            mode=tenant.mode_name,
            guarantee_share=tenant.guarantee_share + (before.guarantee_share if before else 0.0),
            maximum_share=max(tenant.max_share, before.maximum_share if before else 0.0),
            guarantee_blocks=tenant.guarantee_blocks + (before.guarantee_blocks if before else 0),
            maximum_blocks=max(tenant.max_blocks, before.maximum_blocks if before else 0),
            zero_on_change=tenant.zero_on_change or (before is not None and before.zero_on_change),
        )
    return tuple(found.values())
