"""`coppice tenants ...`: look at a tenants file, and change it while the services run."""

from __future__ import annotations

import json as json_module
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coppice.errors import UsageError
from coppice_cli.variables import Command

File = Annotated[Path, typer.Argument(help="The tenants file.", show_default=False)]
Id = Annotated[str, typer.Argument(help="The tenant's id.", show_default=False)]


def add_to(tenants: typer.Typer) -> None:
    """Hang the commands up under `coppice tenants`."""
    for command in (check, show, add, revoke, schema):
        tenants.command(cls=Command)(command)
    tenants.command("rotate-key", cls=Command)(rotate_key)


def check(file: File) -> None:
    """Whether a file is right; exit code 2 and the line when it is not."""
    from coppice.tenants.file import parse_tenants, read_tenants, version_of

    content = read_tenants(file)
    count = len(parse_tenants(file, content).tenants)
    typer.echo(f"{file}: {count} tenant{'s' if count != 1 else ''}, version {version_of(content)}")


def show(
    file: File,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
) -> None:
    """Tenants with their modes, shares, limits and keys; never a whole digest."""
    from coppice_cli.tenants.views import show_tenants

    show_tenants(file, datetime.now(UTC), as_json=json)


def add(
    file: File,
    tenant_id: Id,
    mode: Annotated[str, typer.Option(help="private, strict, disabled, or shared:GROUP. Default: private.")] = "",
    key_name: Annotated[str, typer.Option(help="What to call the key.")] = "",
    guarantee_share: Annotated[float | None, typer.Option(help="Of each worker's blocks, always available.")] = None,
    guarantee_blocks: Annotated[int | None, typer.Option(help="The same as a number of blocks.")] = None,
    max_share: Annotated[float | None, typer.Option(help="Of each worker's blocks, at most.")] = None,
    max_blocks: Annotated[int | None, typer.Option(help="The same as a number of blocks.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once, running and waiting.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Of those, how many may wait.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of the service while others want some, too.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="0: no limit.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompt and output together; 0: no limit.")] = None,
    tokens_per_month: Annotated[int | None, typer.Option(help="The same by UTC months; 0: no limit.")] = None,
    soft_tokens_per_month: Annotated[int | None, typer.Option(help="From here on the log says so; 0: never.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="That it may ask for; may be repeated. Default: all.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and output together.")] = None,
    max_retain_ms: Annotated[int | None, typer.Option(help="That it may ask to keep a prompt; 0: never.")] = None,
    shows_cached_tokens: Annotated[
        bool | None, typer.Option("--shows-cached-tokens/--hides-cached-tokens", help="In usage. Default: shown.")
    ] = None,
) -> None:
    """Add a tenant, and print its key. The key is stored nowhere: this is the only time that it is shown."""
    from coppice_cli.tenants.operations import add_tenant

    word, _, group = mode.partition(":")
    if word == "shared" and not group:
        raise UsageError("--mode shared needs a group", hint="write shared:GROUP")
    fields = {
        "mode": ({"shared": group} if group else mode) or None,
        "guarantee_share": guarantee_share,
        "guarantee_blocks": guarantee_blocks,
        "max_share": max_share,
        "max_blocks": max_blocks,
        "concurrency": concurrency,
        "max_queued": max_queued,
        "weight": weight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_month": tokens_per_month,
        "soft_tokens_per_month": soft_tokens_per_month,
        "models": model or None,
        "max_context": max_context,
        "max_retain_ms": max_retain_ms,
        "shows_cached_tokens": shows_cached_tokens,
    }
    _show_key(add_tenant(file, tenant_id, fields, key_name), f"tenant {tenant_id} is added")


def rotate_key(
    file: File,
    tenant_id: Id,
    name: Annotated[str, typer.Option(help="What to call the new key.")] = "",
    keep_old_for: Annotated[str, typer.Option(help="How long the old keys stay valid: 90s, 30m, 24h, 7d.")] = "24h",
) -> None:
    """Give a tenant a new key, and print it; the old ones get an end. To end one at once: revoke."""
    from coppice_cli.tenants.operations import duration, rotate_key

    key = rotate_key(file, tenant_id, name, duration(keep_old_for), datetime.now(UTC))
    _show_key(key, f"the old keys of tenant {tenant_id} are valid for {keep_old_for} more")


def revoke(
    file: File,
    tenant_id: Id,
    key: Annotated[str, typer.Option(help="Name of the key, or first digits of its digest. Default: all.")] = "",
) -> None:
    """Remove a tenant's keys. The tenant stays; without a key nobody can call as it."""
    from coppice_cli.tenants.operations import revoke

    for label in revoke(file, tenant_id, key):
        typer.echo(f"key {label} of tenant {tenant_id} is revoked", err=True)


def schema() -> None:
    """Print the JSON schema of the file."""
    from coppice_cli.tenants.views import schema_of_file

    typer.echo(json_module.dumps(schema_of_file(), indent=2))


def _show_key(key: str, what: str) -> None:
    typer.echo(key)
    typer.echo(f"{what}; this is the only time that the key is shown", err=True)
