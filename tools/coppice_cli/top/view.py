"""A frame as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coppice_cli.top.rates import Frame, TenantRow, WorkerRow

_BAR = 24  # cells


def drawn(frame: Frame) -> Group:
    parts: list[RenderableType] = [_headline(frame)]
    parts += [Text(f"! {fault}", style="bold red") for fault in frame.faults]
    parts += [Text(), _tenants(frame.tenants)]
    if frame.workers is not None:
        parts += [Text(), _workers(frame.workers)]
    return Group(*parts)


def _headline(frame: Frame) -> Text:
    words = [
        f"steps {_number(frame.steps_per_s)}/s",
        f"preemptions {_number(frame.preemptions_per_s)}/s",
        f"blocks asked back {_number(frame.reclaims_per_s)}/s",
    ]
    return Text(f"coppice top: {', '.join(words)}; rates over {frame.window_s:.0f} s", style="bold")


def _tenants(rows: tuple[TenantRow, ...]) -> Table:
    table = _table(
        *("tenant", "running", "waiting", "in tok/s", "out tok/s", "hits", "hits ever", "held", "guarantee"),
        *("evicted/s", "ttft", "mostly"),
    )
    for row in rows:
        now, domain = row.now, row.domain
        table.add_row(
            row.name,
            _count(None if now is None else now.running),
            _count(None if now is None else now.waiting),
            "-" if now is None else _number(row.in_per_s),
            "-" if now is None else _number(row.out_per_s),
            _percent(row.hit_share),
            _percent(row.hit_share_ever),
            _count(None if domain is None else domain.held),
            _count(None if domain is None else domain.guarantee),
            _number(row.evicted_per_s),
            "-" if now is None or now.ttft_ms is None else f"{now.ttft_ms:.0f} ms",
            "" if now is None else now.cause,
        )
    if not rows:
        table.add_row("nobody yet")
    return table


def _workers(rows: tuple[WorkerRow, ...]) -> RenderableType:
    if not rows:
        return Text("no worker is registered")
    table = _table("worker", "state", "blocks", "", "leased", "cached", "free", "draining", "leases", "steps/s")
    for row in rows:
        now = row.now
        counts = (now.leased, now.cached, now.free, now.draining, now.leases)
        table.add_row(row.name, now.state, str(now.num_blocks), _bar(row), *map(str, counts), _number(row.steps_per_s))
    return table


def _bar(row: WorkerRow) -> Text:
    """Leased, cached, draining, free."""
    bar, whole = Text(), max(1, row.now.num_blocks)
    filled = 0
    for count, letter, style in (
        (row.now.leased, "#", "green"),
        (row.now.cached, "=", "blue"),
        (row.now.draining, "x", "red"),
    ):
        cells = min(_BAR - filled, -(-count * _BAR // whole))  # whatever is there is seen
        bar.append(letter * cells, style=style)
        filled += cells
    bar.append("." * (_BAR - filled), style="dim")
    return bar


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in ("", "mostly") else "right", no_wrap=True)
    return table


def _count(found: int | None) -> str:
    return "-" if found is None else str(found)


def _number(found: float | None) -> str:
    if found is None:
        return "-"
    return f"{found:.0f}" if found >= 10 or found == 0 else f"{found:.1f}"


def _percent(found: float | None) -> str:
    return "-" if found is None else f"{found:.0%}"
