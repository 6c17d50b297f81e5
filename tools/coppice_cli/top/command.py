"""`coppice top`: its flags, and one frame after another."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.errors import EXIT_FAILURE, EXIT_OK, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_cli.cache.client import DEFAULT_URL as CACHE_URL
from coppice_cli.cache.client import CacheClient
from coppice_cli.operator_client import OperatorClient
from coppice_cli.requests.commands import DEFAULT_URL as SCHEDULER_URL
from coppice_cli.requests.commands import SchedulerClient
from coppice_cli.tls_options import TlsCa, TlsCert, TlsKey, files_of
from coppice_cli.variables import Command

if TYPE_CHECKING:
    from coppice_cli.top.samples import Sample

CALL_S = 5.0
_WIDTH_ELSEWHERE = 140  # of a pipe or a file


class TopCache(CacheClient):
    flag = "--cache-url"
    call_s = CALL_S


class TopScheduler(SchedulerClient):
    flag = "--scheduler-url"
    call_s = CALL_S

    def metrics(self) -> str:
        return self._text("/metrics")


class TopWorker(OperatorClient):
    role = Role.WORKER
    service = "worker"
    flag = "--worker"
    printed = "metrics"
    call_s = CALL_S

    def metrics(self) -> str:
        return self._text("/metrics")


def add_to(app: typer.Typer) -> None:
    app.command(cls=Command)(top)


def top(
    cache_url: Annotated[
        str,
        typer.Option(
            envvar="COPPICE_ADMIN_URL", help="Admin REST of the cache; `coppice up` prints it as cache admin."
        ),
    ] = CACHE_URL,
    scheduler_url: Annotated[
        str,
        typer.Option(
            envvar="COPPICE_REQUESTS_URL", help="The scheduler's metrics port; `coppice up` prints it as requests."
        ),
    ] = SCHEDULER_URL,
    worker: Annotated[
        list[str],
        typer.Option(help="NAME=URL of a worker's metrics, for its steps, such as worker-0=http://127.0.0.1:8080."),
    ] = [],  # noqa: B006 # typer copies it
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds from one look to the next.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print one frame and end; exit code 1 when a service is silent.")
    ] = False,
    cert: TlsCert = None,
    key: TlsKey = None,
    ca: TlsCa = None,
) -> None:
    """Who runs, waits and holds memory, live: by tenant and by worker. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from coppice_cli.top.rates import frame_of, kept
    from coppice_cli.top.samples import look
    from coppice_cli.top.view import drawn

    files = files_of(cert, key, ca)
    tls = None if files is None else Credentials(files, Role.OPERATOR)
    cache, scheduler = TopCache(cache_url, tls), TopScheduler(scheduler_url, tls)
    workers = {name: TopWorker(url, tls) for name, url in map(_named, worker)}
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, width=None if is_terminal else _WIDTH_ELSEWHERE)
    samples: list[Sample] = [look(cache, scheduler, workers)]

    def next_frame() -> object:
        time.sleep(interval)
        samples.append(look(cache, scheduler, workers))
        samples[:] = kept(samples)
        return drawn(frame_of(samples))

    if once or not is_terminal:
        console.print(next_frame())
        while not once:
            console.print()
            console.print(next_frame())
        raise typer.Exit(EXIT_FAILURE if samples[-1].faults else EXIT_OK)
    with Live(drawn(frame_of(samples)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(next_frame(), refresh=True)  # type: ignore[arg-type]


def _named(text: str) -> tuple[str, str]:
    """Raises UsageError."""
    name, is_there, url = text.partition("=")
    if not (name and is_there and url):
        raise UsageError(f"--worker {text} has no name", hint="such as worker-0=http://127.0.0.1:8080")
    return name, url
