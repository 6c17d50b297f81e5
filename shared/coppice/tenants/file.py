"""The tenants file: read, parsed, validated as a whole; errors name the file, the line and the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coppice.errors import UsageError
from coppice.ids import DomainId
from coppice.settings import nearest
from coppice.tenants.keys import ApiKey
from coppice.tenants.tenant import Tenant, domain_shares

MAX_TENANTS_FILE_BYTES = 4 * 1024 * 1024
VERSION_DIGITS = 12
_SHARE_SLACK = 1e-9  # ten tenants of 0.1 sum to a hair more than 1


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
            for key in tenant.api_key_sha256:
                other = owner_of_digest.setdefault(key.sha256, tenant.id)
                if other != tenant.id:
                    raise ValueError(f"tenants {other!r} and {tenant.id!r} have the same API key")
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


def read_tenants(path: Path) -> bytes:
    """The file as it is. Raises UsageError."""
    try:
        size = path.stat().st_size
        if size > MAX_TENANTS_FILE_BYTES:
            raise UsageError(f"{path}: {size} bytes is too large; the limit is {MAX_TENANTS_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the tenants file {path}: {error.strerror}") from error


def version_of(content: bytes) -> str:
    """What tells two contents apart: 12 hexadecimal digits of their SHA-256."""
    return sha256(content).hexdigest()[:VERSION_DIGITS]


def load_tenants(path: Path) -> TenantsFile:
    """Read, parse and validate. Raises UsageError."""
    return parse_tenants(path, read_tenants(path))


def parse_tenants(path: Path, content: bytes) -> TenantsFile:
    """Parse and validate; `path` is what errors name. Raises UsageError."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start})") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_double_keys(path, root)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: must be a mapping with the key tenants", hint="see deploy/tenants.example.yaml")
    try:
        return TenantsFile.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        places = [problem["loc"] for problem in found]
        problems = [
            _explain(path, root, dict(problem))
            for problem in found
            if problem["type"] != "too_short" or not _has_within(places, problem["loc"])
        ]
        raise UsageError("; ".join(problems), hint="see deploy/tenants.example.yaml") from None


def _has_within(places: Iterable[tuple[str | int, ...]], place: tuple[str | int, ...]) -> bool:
    """An entry with a mistake does not count as one, so a list of nothing else would also be called empty."""
    return any(other[: len(place)] == place and other != place for other in places)


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
    5: tuple(ApiKey.model_fields),
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
