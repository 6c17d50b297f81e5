"""Tenants for a person, or as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from coppice.tenants.file import TenantsFile, parse_tenants, read_tenants, version_of
from coppice.tenants.keys import ApiKey
from coppice.tenants.tenant import Tenant
from coppice_cli.tenants.yaml_edits import time_text

_COLUMNS = ("tenant", "mode", "guarantee", "maximum", "weight", "requests", "waiting", "per minute", "narrowed", "keys")


def show_tenants(path: Path, now: datetime, *, as_json: bool) -> None:
    """Raises UsageError."""
    content = read_tenants(path)
    tenants = parse_tenants(path, content).tenants
    if as_json:
        plain = [_plain(tenant, now) for tenant in tenants]
        typer.echo(json.dumps({"version": version_of(content), "tenants": plain}))
        return
    table = Table(title=f"{path}, version {version_of(content)}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for tenant in tenants:
        table.add_row(*_row(tenant, now))
    Console(width=None if Console().is_terminal else 160).print(table)


def schema_of_file() -> dict[str, Any]:
    """JSON schema of the file, for editors and checks of configuration."""
    schema = TenantsFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Coppice tenants file"}


def _row(tenant: Tenant, now: datetime) -> list[str]:
    rates = [
        f"{count:,} {what}"
        for count, what in (
            (tenant.requests_per_minute, "requests"),
            (tenant.tokens_per_minute, "tokens"),
            (tenant.tokens_per_month, "tokens a month"),
        )
        if count
    ]
    return [
        tenant.id,
        _mode(tenant),
        f"{tenant.guarantee_blocks} blocks" if tenant.guarantee_blocks else f"{tenant.guarantee_share:g}",
        f"{tenant.max_share:g}" + (f", {tenant.max_blocks} blocks" if tenant.max_blocks else ""),
        f"{tenant.weight:g}",
        str(tenant.concurrency),
        str(tenant.max_queued),
        ", ".join(rates) or "-",
        "\n".join(_narrowed(tenant)) or "-",
        "\n".join(f"{key.label}{_ending(key, now)}" for key in tenant.api_key_sha256) or "none: nobody can call",
    ]


def _narrowed(tenant: Tenant) -> Iterator[str]:
    """What is narrower than what the service has."""
    if tenant.models is not None:
        yield f"models: {', '.join(tenant.models)}"
    if tenant.max_context is not None:
        yield f"context: {tenant.max_context:,}"
    if tenant.max_retain_ms is not None:
        yield f"kept: {tenant.max_retain_ms:,} ms"
    if not tenant.shows_cached_tokens:
        yield "cached tokens: hidden"


def _ending(key: ApiKey, now: datetime) -> str:
    if key.expires is None:
        return ""
    return f" ({'expired' if key.has_expired(now) else 'until'} {time_text(key.expires)})"


def _mode(tenant: Tenant) -> str:
    return tenant.mode if isinstance(tenant.mode, str) else f"shared:{tenant.mode.shared}"


def _plain(tenant: Tenant, now: datetime) -> dict[str, Any]:
    plain = tenant.model_dump(mode="json", exclude={"api_key_sha256"})
    plain["keys"] = [
        {
            "name": key.label,
            "expires": time_text(key.expires) if key.expires else None,
            "expired": key.has_expired(now),
        }
        for key in tenant.api_key_sha256
    ]
    return plain
