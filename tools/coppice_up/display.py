"""What a person sees while the stack starts, runs and stops: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_MESSAGE = re.compile(r"^\S+Z [A-Z]+ [\w.]+: ")  # what stands before the message in our log lines


class Display(Protocol):
    """Where the supervisor reports to."""

    def begin(self, names: Sequence[str]) -> None: ...
    def starting(self, name: str, last_line: str) -> None:
        """`last_line` of its log, if it has any yet."""

    def ready(self, name: str, after_s: float) -> None: ...
    def all_ready(self) -> None: ...
    def note(self, text: str) -> None: ...
    def log_lines(self, name: str, lines: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, names: Sequence[str]) -> None:
        self.note(f"starting {', '.join(names)}")

    def starting(self, name: str, last_line: str) -> None:
        """Said once for all in `begin`; a line each would only be noise."""

    def ready(self, name: str, after_s: float) -> None:
        self.note(f"{name} is ready after {after_s:.1f} s")

    def all_ready(self) -> None:
        """What follows, the addresses, says it."""

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def log_lines(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            self.note(f"{name} | {line}")

    def close(self) -> None:
        """Nothing is held."""


class LiveDisplay(PlainDisplay):
    """A table with a spinner per child until all are ready, then plain lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rows: dict[str, Spinner | str] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8, transient=False)
        self._shown = False

    def begin(self, names: Sequence[str]) -> None:
        self._rows = dict.fromkeys(names, "[dim]waits")
        self._live.start()
        self._shown = True

    def starting(self, name: str, last_line: str) -> None:
        if self._shown:
            text = _MESSAGE.sub("", last_line)
            self._rows[name] = Spinner("dots", text=Text(f"starting  {text}".rstrip(), no_wrap=True))

    def ready(self, name: str, after_s: float) -> None:
        if self._shown:
            self._rows[name] = f"[green]ready[/] [dim]after {after_s:.1f} s"
        else:
            super().ready(name, after_s)

    def all_ready(self) -> None:
        self.close()

    def close(self) -> None:
        if self._shown:
            self._shown = False
            self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._rows.items():
            table.add_row(f"  {name}", state)
        return table


def display_for(console: Console) -> Display:
    """Live on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
