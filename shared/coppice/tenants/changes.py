"""What differs between two tenants files, in names."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class TenantChanges:
    """Ids of tenants, and keys as TENANT/KEY, where a key is its name or the first digits of its digest."""

    tenants_added: tuple[str, ...]
    tenants_removed: tuple[str, ...]
    tenants_changed: tuple[str, ...]  # in something else than their keys: mode, shares, limits
    keys_added: tuple[str, ...]
    keys_revoked: tuple[str, ...]

    @property
    def count(self) -> int:
        tenants = len(self.tenants_added) + len(self.tenants_removed) + len(self.tenants_changed)
        return tenants + len(self.keys_added) + len(self.keys_revoked)


def changes_between(before: TenantDirectory, after: TenantDirectory) -> TenantChanges:
    old, new = _by_id(before), _by_id(after)
    old_keys, new_keys = _keys(before), _keys(after)
    return TenantChanges(
        tenants_added=tuple(id for id in new if id not in old),
        tenants_removed=tuple(id for id in old if id not in new),
        tenants_changed=tuple(id for id in new if id in old and _without_keys(new[id]) != _without_keys(old[id])),
        keys_added=tuple(label for key, label in new_keys.items() if key not in old_keys),
        keys_revoked=tuple(label for key, label in old_keys.items() if key not in new_keys),
    )


def _by_id(directory: TenantDirectory) -> dict[str, Tenant]:
    return {tenant.id: tenant for tenant in directory.tenants}


def _keys(directory: TenantDirectory) -> dict[tuple[str, str], str]:
    """The label of each key, by tenant and digest."""
    return {
        (tenant.id, key.sha256): f"{tenant.id}/{key.label}"
        for tenant in directory.tenants
        for key in tenant.api_key_sha256
    }


def _without_keys(tenant: Tenant) -> Tenant:
    return tenant.model_copy(update={"api_key_sha256": ()})
