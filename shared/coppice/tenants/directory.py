"""Who a credential belongs to."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Self

from coppice.tenants.file import parse_tenants, read_tenants, version_of
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import DomainShares, Tenant, domain_shares

DEFAULT_TENANT_ID = "default"


class TenantDirectory:
    """All tenants of a deployment, and who a credential belongs to."""

    def __init__(self, tenants: Iterable[Tenant], *, keyless: Tenant | None = None, version: str = "") -> None:
        self.tenants = tuple(tenants)
        self.version = version  # of the file; empty without one
        self._keyless = keyless
        self._keys = [
            (key.sha256.encode("ascii"), key, tenant.model_copy(update={"api_key_sha256": (key,)}))
            for tenant in self.tenants
            for key in tenant.api_key_sha256
        ]
        self._owners = {key.sha256: tenant.id for tenant in self.tenants for key in tenant.api_key_sha256}

    @classmethod
    def single_default(cls) -> Self:
        """No file: one tenant, any key or none."""
        tenant = Tenant.model_construct(id=DEFAULT_TENANT_ID, api_key_sha256=())
        return cls((tenant,), keyless=tenant)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a tenants file. Raises UsageError that names the file, the line and what is wrong."""
        return cls.parse(Path(path), read_tenants(Path(path)))

    @classmethod
    def parse(cls, path: Path, content: bytes) -> Self:
        """The same of a content that was read before; `path` is what errors name."""
        return cls(parse_tenants(path, content).tenants, version=version_of(content))

    @property
    def needs_key(self) -> bool:
        return self._keyless is None

    def authenticate(self, bearer: str | None, now: datetime) -> Tenant | None:
        """The tenant whose key this is; nobody when it is unknown, missing or expired at `now` (with its zone).

        The tenant comes with this one of its keys only, so that who called with which is known later (see `admits`).
        Every known digest is compared, each in constant time, so that the answer's time tells nothing about a key.
        """
        if self._keyless is not None:
            return self._keyless
        if bearer is None:
            return None
        presented = digest_of_key(bearer).encode("ascii")
        found: Tenant | None = None
        for digest, key, tenant in self._keys:
            if hmac.compare_digest(digest, presented) and not key.has_expired(now):
                found = tenant
        return found

    def admits(self, tenant: Tenant) -> bool:
        """Whether the key that a tenant was found by is still one of its keys; it may have expired meanwhile."""
        return self._keyless is not None or any(
            self._owners.get(key.sha256) == tenant.id for key in tenant.api_key_sha256
        )

    def domains(self) -> tuple[DomainShares, ...]:
        """Plain records for the cache service's quotas."""
        return domain_shares(self.tenants)
