"""`coppice why`, `trace`, `requests`, `usage`: what became of requests, and what they took."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from coppice.errors import UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_cli.operator_client import OperatorClient
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import Command

DEFAULT_URL = "http://127.0.0.1:8075"
_COLUMNS = ("at", "id", "tenant", "status", "end", "tokens_in", "tokens_cached", "tokens_out")

Url = Annotated[
    str,
    typer.Option(
        envvar="COPPICE_REQUESTS_URL", help="The scheduler's metrics port; `coppice up` prints it as requests."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")]


class SchedulerClient(OperatorClient):
    role = Role.SCHEDULER
    service = "scheduler"
    flag = "--url"
    printed = "requests"
    unknown = ("request_not_found",)

    def requests(self, limit: int, tenant: str) -> Any:
        query = {"limit": limit, **({"tenant": tenant} if tenant else {})}
        return self._call("GET", f"/requests?{urlencode(query)}")

    def request(self, request_id: str) -> Any:
        return self._call("GET", f"/requests/{quote(request_id, safe='')}")


def add_to(app: typer.Typer) -> None:
    """Hang the commands up under `coppice`."""
    for command in (why, trace, requests, usage):
        app.command(cls=Command)(command)


def _client(url: str, cert: Path | None, key: Path | None, ca: Path | None) -> SchedulerClient:
    files = files_of(cert, key, ca)
    return SchedulerClient(url, None if files is None else Credentials(files, Role.OPERATOR))


def why(
    request_id: Annotated[str, typer.Argument(help="Its X-Request-Id, or the id of its answer.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """Why a request took its time: what it waited for and who held it, the longest first."""
    found = _client(url, cert, key, ca).request(request_id)
    if as_json:
        typer.echo(json.dumps(found, separators=(",", ":")))
        return
    record = found["request"]
    typer.echo(_headline(record))
    for place, sentence in enumerate(found["why"]):
        typer.echo(f"  {'because it' if not place and record.get('stages') else '          '} {sentence}".rstrip())


def trace(
    request_id: Annotated[str, typer.Argument(help="Its X-Request-Id, or the id of its answer.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """The stages of a request's life and the chunks of its prompt, as bars on one line of time."""
    from coppice_cli.requests.waterfall import lines_of

    record = _client(url, cert, key, ca).request(request_id)["request"]
    if as_json:
        typer.echo(json.dumps(record, separators=(",", ":")))
        return
    typer.echo(_headline(record))
    if record.get("trace"):
        typer.echo(f"trace {record['trace']}")
    for line in lines_of(record, shutil.get_terminal_size((140, 24)).columns):
        typer.echo(line)


def _headline(record: dict[str, Any]) -> str:
    first = f", first token after {record['ttft_ms'] / 1000:.2f} s" if record.get("ttft_ms") else ""
    tokens = f"{record.get('tokens_in', 0)} tokens in ({record.get('tokens_cached', 0)} cached)"
    tokens += f", {record.get('tokens_out', 0)} out"
    who = record.get("tenant") or "nobody known"
    took = f"{record.get('total_ms', 0) / 1000:.2f} s"
    return f"{record['id']} of {who}: {record['status']} {record['end']}, {took}{first}; {tokens}"


def requests(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, the newest first.")] = 20,
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """The newest requests that have ended, and what took their time."""
    found = _client(url, cert, key, ca).requests(limit, tenant)
    if as_json:
        typer.echo(json.dumps(found, separators=(",", ":")))
        return
    _table(
        ("at", "id", "tenant", "status", "end", "in", "cached", "out", "queue ms", "ttft ms", "total ms", "cause"),
        [
            (
                *(str(record.get(name, "")) for name in _COLUMNS),
                *(f"{record.get(name, 0.0):.1f}" for name in ("queue_ms", "ttft_ms", "total_ms")),
                " ".join(part for part in (record.get("cause"), record.get("blocker")) if part),
            )
            for record in found["requests"]
        ],
    )


def usage(
    folder: Annotated[Path, typer.Argument(help="What the scheduler's --request-log names.")],
    since: Annotated[
        str, typer.Option("--from", help="UTC, such as 2026-01-31 or 2026-01-31T12:00. Default: today.")
    ] = "",
    until: Annotated[str, typer.Option("--to", help="UTC, not included. Default: now.")] = "",
    by: Annotated[str, typer.Option(help="tenant, key, model, api, day, month; several with commas.")] = "tenant",
    as_json: Json = False,
) -> None:
    """What was used, to the token: requests and tokens by tenant, key, model or day."""
    from coppice.request_log.reader import between
    from coppice.request_log.usage import GROUPS, summed

    groups = [name.strip() for name in by.split(",")]
    if unknown := [name for name in groups if name not in GROUPS]:
        raise UsageError(f"--by {unknown[0]} is not known", hint=f"of {', '.join(GROUPS)}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", hint="give what the scheduler's --request-log names")
    now = datetime.now(UTC)
    start = _moment(since, "--from") or f"{now:%Y-%m-%d}"
    end = _moment(until, "--to") or f"{now + timedelta(seconds=1):%Y-%m-%dT%H:%M:%S}"
    found = summed(between(folder, start, end), groups)
    if as_json:
        rows = [
            {
                **dict(zip(groups, one.group, strict=True)),
                "requests": one.num_requests,
                "failed": one.num_failed,
                "tokens_in": one.tokens_in,
                "tokens_cached": one.tokens_cached,
                "tokens_out": one.tokens_out,
            }
            for one in found
        ]
        typer.echo(json.dumps({"from": start, "to": end, "usage": rows}, separators=(",", ":")))
        return
    _table(
        (*groups, "requests", "failed", "tokens in", "cached", "tokens out"),
        [
            (
                *one.group,
                *map(str, (one.num_requests, one.num_failed, one.tokens_in, one.tokens_cached, one.tokens_out)),
            )
            for one in found
        ],
    )


def _moment(text: str, flag: str) -> str:
    """As `RequestRecord.at` begins. Raises UsageError."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{flag} {text} is no time", hint="such as 2026-01-31 or 2026-01-31T12:00, in UTC") from None
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="milliseconds")


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
