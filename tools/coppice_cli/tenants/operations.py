"""What the commands change in a tenants file. Keys are made here, and leave as the return value once."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from coppice.errors import UsageError
from coppice.settings import nearest
from coppice.tenants.file import TenantsFile, parse_tenants
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_cli.tenants.replace_file import edit_tenants
from coppice_cli.tenants.yaml_edits import Field, TenantsText, flow_key, scalar

_KEY_BYTES = 24
_DIGITS_MIN = 8  # of a digest that name a key
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,6})([smhd])")


def duration(text: str) -> timedelta:
    """Of `90s`, `30m`, `24h`, `7d`. Raises UsageError."""
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise UsageError(f"{text!r} is no duration above 0", hint="write 90s, 30m, 24h or 7d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def add_tenant(path: Path, tenant_id: str, fields: Mapping[str, Field | None], key_name: str) -> str:
    """The new tenant's key. A file that is not there is made. Raises UsageError, CoppiceError."""
    key = _new_key()
    entry = flow_key(digest_of_key(key), key_name or None)
    given = {name: value for name, value in fields.items() if value is not None}

    def edit(text: str) -> str:
        before = parse_tenants(path, text.encode()).tenants if text else ()
        if any(tenant.id == tenant_id for tenant in before):
            raise UsageError(f"{path}: there is a tenant {tenant_id!r} already", hint="rotate-key gives it a new key")
        after = TenantsText(path, text).add({"id": scalar(tenant_id), "api_key_sha256": entry, **given})
        _refuse_unless(path, parse_tenants(path, after.encode()).tenants[:-1] == before)
        return after

    edit_tenants(path, edit, creates=True)
    return key


def rotate_key(path: Path, tenant_id: str, name: str, keep: timedelta, now: datetime) -> str:
    """A new key. Those of before are good for `keep` more, or shorter where they end sooner; expired ones go."""
    key = _new_key()
    until = (now + keep).replace(microsecond=0)
    added = ApiKey(sha256=digest_of_key(key), name=name or None)

    def edit(text: str) -> str:
        before = parse_tenants(path, text.encode())
        keys = _tenant(path, before, tenant_id).api_key_sha256
        dropped = {at for at, old in enumerate(keys) if old.has_expired(now)}
        ends = {at: until for at, old in enumerate(keys) if old.expires is None or old.expires > until}
        after = TenantsText(path, text).set_keys(tenant_id, ends, dropped, flow_key(added.sha256, added.name))
        meant = [
            old.model_copy(update={"expires": ends.get(at, old.expires)})
            for at, old in enumerate(keys)
            if at not in dropped
        ]
        _refuse_unless(path, _changed(path, before, after, tenant_id) == [*meant, added])
        return after

    edit_tenants(path, edit)
    return key


def revoke(path: Path, tenant_id: str, label: str) -> list[str]:
    """Remove one key (by its name or its first digits), or all where `label` is empty. Returns the labels of these."""
    gone: list[str] = []

    def edit(text: str) -> str:
        before = parse_tenants(path, text.encode())
        keys = _tenant(path, before, tenant_id).api_key_sha256
        dropped = _places(path, tenant_id, keys, label)
        gone.extend(keys[at].label for at in sorted(dropped))
        after = TenantsText(path, text).set_keys(tenant_id, {}, dropped)
        meant = [key for at, key in enumerate(keys) if at not in dropped]
        _refuse_unless(path, _changed(path, before, after, tenant_id) == meant)
        return after

    edit_tenants(path, edit)
    return gone


def _new_key() -> str:
    return f"cp-{secrets.token_hex(_KEY_BYTES)}"


def _tenant(path: Path, file: TenantsFile, tenant_id: str) -> Tenant:
    for tenant in file.tenants:
        if tenant.id == tenant_id:
            return tenant
    known = nearest(tenant_id, [tenant.id for tenant in file.tenants])
    raise UsageError(f"{path}: there is no tenant {tenant_id!r}", hint=known)


def _places(path: Path, tenant_id: str, keys: Sequence[ApiKey], label: str) -> set[int]:
    if not label:
        return set(range(len(keys)))
    found = {at for at, key in enumerate(keys) if label == key.name}
    if not found and len(label) >= _DIGITS_MIN:
        found = {at for at, key in enumerate(keys) if key.sha256.startswith(label.lower())}
    if not found:
        hint = nearest(label, [key.label for key in keys]) if keys else "it has no key"
        raise UsageError(f"{path}: tenant {tenant_id!r} has no key {label!r}", hint=hint)
    if len(found) > 1:
        raise UsageError(
            f"{path}: {len(found)} keys of tenant {tenant_id!r} begin with {label}", hint="give more digits"
        )
    return found


def _changed(path: Path, before: TenantsFile, after: str, tenant_id: str) -> list[ApiKey]:
    """The tenant's keys after an edit that leaves all else as it was."""
    tenants = parse_tenants(path, after.encode()).tenants
    others = [tenant for tenant in tenants if tenant.id != tenant_id]
    _refuse_unless(path, others == [tenant for tenant in before.tenants if tenant.id != tenant_id])
    (changed,) = (tenant for tenant in tenants if tenant.id == tenant_id)
    return list(changed.api_key_sha256)


def _refuse_unless(path: Path, is_as_meant: bool) -> None:
    """YAML that is written in a way that our edits do not understand, such as aliases."""
    if not is_as_meant:
        raise UsageError(f"{path} is written in a form that cannot be edited here", hint="edit it by hand")
