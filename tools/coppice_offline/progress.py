"""A bar on stderr while prompts are served. Refreshed by whoever reports, so it needs no thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY_S = 0.1


class Job(Protocol):
    """What a prompt asks for: a request, or a search."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def num_tokens(self) -> int:
        """Sampled so far."""
        ...


class Reporter(Protocol):
    def report(self) -> None:
        """Called after every step."""


class _Silent:
    def report(self) -> None:
        """Nobody looks."""


class _Bar:
    def __init__(self, progress: Progress, jobs: Sequence[Job]) -> None:
        self._progress = progress
        self._jobs = jobs
        self._task = progress.add_task("generating", total=len(jobs), rate="")
        self._began_s = time.monotonic()
        self._shown_s = 0.0

    def report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            self.show()

    def show(self) -> None:
        num_tokens = sum(job.num_tokens for job in self._jobs)
        rate = num_tokens / max(time.monotonic() - self._began_s, 1e-9)
        num_done = sum(job.has_ended for job in self._jobs)
        self._progress.update(self._task, completed=num_done, rate=f"{rate:,.0f} tokens/s")
        self._progress.refresh()


@contextmanager
def progress_bar(jobs: Sequence[Job], wanted: bool | None) -> Iterator[Reporter]:
    """`wanted` None: where stderr is a terminal."""
    console = Console(stderr=True)
    if wanted is False or (wanted is None and not console.is_terminal):
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as bar:
        shown = _Bar(bar, jobs)
        yield shown
        shown.show()
