"""Tenants: who may call, and how much of each worker's KV blocks is theirs.

    credential --sha256--> Tenant --> DomainId          tenant/<id>      mode private, strict, disabled
                                                        group/<name>     mode {shared: <name>}

A domain is what prefixes are shared within; it comes from the credential and from nothing else. The file holds digests
of keys, never keys. `deploy/tenants.example.yaml` explains each field.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.settings import nearest

DEFAULT_TENANT_ID = "default"
MAX_TENANTS_FILE_BYTES = 4 * 1024 * 1024
_SHARE_SLACK = 1e-9  # ten tenants of 0.1 sum to a hair more than 1
_MODES = ("private", "strict", "disabled")

ModeName = Literal["private", "strict", "disabled", "shared"]


class SharedMode(BaseModel):
    """`mode: {shared: GROUP}`: prefixes are shared with all tenants that name the same group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


class Tenant(BaseModel):
    """One entry of `tenants:`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    api_key_sha256: tuple[str, ...] = Field(min_length=1, repr=False)
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

    @field_validator("mode", mode="before")
    @classmethod
    def _known_mode(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in _MODES:
            hint = "write mode: {shared: GROUP}" if value == "shared" else nearest(value, [*_MODES, "shared"])
            raise ValueError(f"{value!r} is no mode; {hint}")
        return value

    @field_validator("api_key_sha256", mode="before")
    @classmethod
    def _digests(cls, value: Any) -> Any:
        digests = (value,) if isinstance(value, str) else value
        for digest in digests if isinstance(digests, (list, tuple)) else ():
            if not isinstance(digest, str) or len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
                raise ValueError(
                    "must be the SHA-256 of the key in 64 hexadecimal digits, quoted; "
                    "make one with: printf %s KEY | sha256sum"
                )
        return tuple(digest.lower() for digest in digests) if isinstance(digests, (list, tuple)) else digests

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.guarantee_share and self.guarantee_blocks:
            raise ValueError("give guarantee_share or guarantee_blocks, not both")
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


class TenantsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tenants: tuple[Tenant, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _together(self) -> Self:
        seen_ids: set[str] = set()
        owner_of_digest: dict[str, str] = {}
        for tenant in self.tenants:
            if tenant.id in seen_ids:
                raise ValueError(f"two tenants have the id {tenant.id!r}")
            seen_ids.add(tenant.id)
            for digest in tenant.api_key_sha256:
                other = owner_of_digest.setdefault(digest, tenant.id)
                if other != tenant.id:
                    raise ValueError(f"tenants {other!r} and {tenant.id!r} have the same API key")
            if len(set(tenant.api_key_sha256)) != len(tenant.api_key_sha256):
                raise ValueError(f"tenant {tenant.id!r} names one API key twice")
        total = sum(tenant.guarantee_share for tenant in self.tenants)
        if total > 1 + _SHARE_SLACK:
            raise ValueError(f"the guarantee_share of all tenants sum to {total:.6g}; a worker has only 1 to give")
        for shares in domain_shares(self.tenants):
            if shares.guarantee_share > shares.maximum_share + _SHARE_SLACK:
                raise ValueError(
                    f"{shares.domain}: the members' guarantee_share sum to {shares.guarantee_share:.6g}, above the "
                    f"largest max_share among them ({shares.maximum_share:.6g})"
                )
            if shares.maximum_blocks and shares.guarantee_blocks > shares.maximum_blocks:
                raise ValueError(
                    f"{shares.domain}: the members' guarantee_blocks sum to {shares.guarantee_blocks}, above the "
                    f"largest max_blocks among them ({shares.maximum_blocks})"
                )
        self._one_unit_per_group()
        return self

    def _one_unit_per_group(self) -> None:
        """The larger of 0.5 and 2000 blocks depends on the worker, and the larger one is meant to count."""
        units: dict[DomainId, bool] = {}
        for tenant in self.tenants:
            in_blocks = tenant.max_blocks > 0
            if units.setdefault(tenant.domain, in_blocks) != in_blocks:
                raise ValueError(f"{tenant.domain}: give max_blocks for all members or for none")


def domain_shares(tenants: Iterable[Tenant]) -> tuple[DomainShares, ...]:
    """The domains of `tenants`, in their order. A group's guarantees add up; its maximum is its members' largest."""
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
        )
    return tuple(found.values())


def digest_of_key(api_key: str) -> str:
    """What `api_key_sha256` holds for a key."""
    return sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()


class TenantDirectory:
    """All tenants of a deployment, and who a credential belongs to."""

    def __init__(self, tenants: Iterable[Tenant], *, keyless: Tenant | None = None) -> None:
        self.tenants = tuple(tenants)
        self._keyless = keyless
        self._digests = [
            (digest.encode("ascii"), tenant) for tenant in self.tenants for digest in tenant.api_key_sha256
        ]

    @classmethod
    def single_default(cls) -> Self:
        """No file: one tenant, any key or none."""
        tenant = Tenant.model_construct(id=DEFAULT_TENANT_ID, api_key_sha256=())
        return cls((tenant,), keyless=tenant)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a tenants file. Raises UsageError that names the file, the line and what is wrong."""
        return cls(load_tenants(Path(path)).tenants)

    @property
    def needs_key(self) -> bool:
        return self._keyless is None

    def authenticate(self, bearer: str | None) -> Tenant | None:
        """The tenant whose key this is; nobody when it is unknown or missing.

        Every known digest is compared, each in constant time, so that the answer's time tells nothing about a key.
        """
        if self._keyless is not None:
            return self._keyless
        if bearer is None:
            return None
        presented = digest_of_key(bearer).encode("ascii")
        found: Tenant | None = None
        for digest, tenant in self._digests:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found

    def domains(self) -> tuple[DomainShares, ...]:
        """Plain records for the cache service's quotas."""
        return domain_shares(self.tenants)


# --- the file -----------------------------------------------------------------------------------------------------


def load_tenants(path: Path) -> TenantsFile:
    """Parse and validate. Raises UsageError."""
    try:
        size = path.stat().st_size
        if size > MAX_TENANTS_FILE_BYTES:
            raise UsageError(f"{path}: {size} bytes is too large; the limit is {MAX_TENANTS_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the tenants file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start})") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_double_keys(path, root)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: must be a mapping with the key tenants", hint="see deploy/tenants.example.yaml")
    try:
        return TenantsFile.model_validate(data)
    except ValidationError as error:
        # A tenant with a mistake does not count as one, so a file of nothing else would also be called empty.
        found = [problem for problem in error.errors(include_url=False) if problem["type"] != "too_short"]
        problems = [_explain(path, root, dict(problem)) for problem in found or error.errors(include_url=False)]
        raise UsageError("; ".join(problems), hint="see deploy/tenants.example.yaml") from None


def _refuse_double_keys(path: Path, node: Any) -> None:
    """YAML takes the last of two equal keys in silence; in a file about credentials that hides a mistake."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise UsageError(f"{path}:{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _refuse_double_keys(path, part)


def _line_of(node: Any, location: Iterable[str | int]) -> int:
    """Line (from 1) of the deepest node on the way to `location` that the file really has."""
    line = node.start_mark.line
    for step in location:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = (node.value[step], node.value[step])
        if found is None:
            continue  # a name that pydantic put in, such as a member of a union
        line, node = found[0].start_mark.line, found[1]
    return int(line) + 1


_KNOWN_KEYS: Mapping[int, tuple[str, ...]] = {
    1: tuple(TenantsFile.model_fields),
    3: tuple(Tenant.model_fields),
}


_PLAIN_WORDS: Mapping[str, str] = {
    "too_short": "must have at least one entry",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping, such as {id: ..., api_key_sha256: ...}",
}


def _explain(path: Path, root: Any, problem: Mapping[str, Any]) -> str:
    location: tuple[str | int, ...] = problem["loc"]
    where = f"{path}:{_line_of(root, location)}"
    name = ".".join(str(step) for step in location)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {name}; {nearest(str(location[-1]), _KNOWN_KEYS.get(len(location), ('shared',)))}"
    if problem["type"] == "missing":
        return f"{where}: {name} is missing"
    message = _PLAIN_WORDS.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {name}: {message}" if name else f"{where}: {message}"
