"""A picture of a run as SVG, three panels, one colour for each tenant.

first token by time of sending | share of requests within a time | output tokens per second over time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from coppice.errors import UsageError
from coppice_bench.serve.load.records import Record
from coppice_bench.serve.options import ServeOptions

_COLOURS = ("#2f6f4f", "#c2571a", "#3b5fa8", "#8a3d8f", "#8c8c2b", "#4d4d4d")
_WIDTH, _HEIGHT = 360, 260  # of a panel, with its labels
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 34, 14, 44
_TICKS = 5
_BINS_MAX = 60


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    is_line: bool


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    series: tuple[Series, ...]
    legend_below: bool = False  # where lines end at the top


def write_plot(
    path: Path, records: Sequence[Record], options: ServeOptions, start_s: float, report: dict[str, Any]
) -> None:
    """Raises UsageError when the file cannot be written."""
    named = [
        (sender.name, [r for r in records if r.sender == n and r.is_ok]) for n, sender in enumerate(options.senders)
    ]
    title = (
        f"{report['model']}: {options.load}, {report['requests']} requests, {report['output_tok_s']:.0f} output tok/s"
    )
    try:
        path.write_text(draw(title, panels(named, start_s)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {path} cannot be written: {error.strerror}") from None


def panels(named: Sequence[tuple[str, Sequence[Record]]], start_s: float) -> list[Panel]:
    scatter, shares, rates = [], [], []
    ends = [record.end_s - start_s for _, records in named for record in records]
    bins = np.linspace(0, max(ends, default=1.0), min(_BINS_MAX, max(2, len(ends))) + 1)
    for name, records in named:
        if not records:
            continue
        ttft_s = [record.ttft_ms / 1e3 for record in records]
        scatter.append(Series(name, [record.sent_s - start_s for record in records], ttft_s, is_line=False))
        shares.append(Series(name, sorted(ttft_s), [(n + 1) / len(ttft_s) for n in range(len(ttft_s))], is_line=True))
        rates.append(Series(name, list((bins[1:] + bins[:-1]) / 2), _rates(records, bins + start_s), is_line=True))
    return [
        Panel("first token, s", "sent at, s", tuple(scatter)),
        Panel("share of requests with a first token", "within, s", tuple(shares)),
        Panel("output tokens per second", "time, s", tuple(rates)),
    ]


def _rates(records: Sequence[Record], bins: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Tokens of a request count evenly between its first and its last."""
    total = np.zeros(len(bins) - 1)
    for record in records:
        span_s = max(record.last_s - record.first_s, 1e-6)
        inside_s = np.clip(bins[1:], record.first_s, record.first_s + span_s) - np.clip(
            bins[:-1], record.first_s, record.first_s + span_s
        )
        total += record.output_tokens * inside_s / span_s
    return list(total / np.diff(bins))


def draw(title: str, shown: Sequence[Panel]) -> str:
    width, height = _WIDTH * len(shown), _HEIGHT + 24
    body = "".join(line for place, panel in enumerate(shown) for line in _panel(panel, place * _WIDTH))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>{body}</svg>\n'
    )


def _panel(panel: Panel, left: float) -> Iterator[str]:
    x_step, x_max = _ticks(max((max(series.x, default=0) for series in panel.series), default=0))
    y_step, y_max = _ticks(max((max(series.y, default=0) for series in panel.series), default=0))
    x0, y0 = left + _LEFT, _HEIGHT - _BOTTOM + 24.0
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + across * x / x_max, y0 - up * y / y_max

    yield f'<text x="{x0}" y="{y0 - up - 8:.0f}" font-weight="bold">{escape(panel.title)}</text>'
    for number in range(round(y_max / y_step) + 1):
        _, y = at(0, number * y_step)
        yield f'<path d="M{x0} {y:.1f}h{across}" stroke="#ddd"/>'
        yield f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:g}</text>'
    for number in range(round(x_max / x_step) + 1):
        x, _ = at(number * x_step, 0)
        yield f'<text x="{x:.1f}" y="{y0 + 14:.0f}" text-anchor="middle">{number * x_step:g}</text>'
    yield f'<text x="{x0 + across / 2}" y="{y0 + 30:.0f}" text-anchor="middle">{escape(panel.x_label)}</text>'
    for place, series in enumerate(panel.series):
        colour = _COLOURS[place % len(_COLOURS)]
        points = [at(x, y) for x, y in zip(series.x, series.y, strict=True)]
        if series.is_line:
            line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            yield f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        else:
            yield from (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" fill-opacity=".6"/>' for x, y in points
            )
        rows_below = len(panel.series) - 1 - place
        x, y = x0 + across, y0 - 8 - 14 * rows_below if panel.legend_below else y0 - up + 12 + 14 * place
        yield f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="end" fill="{colour}">{escape(series.name)}</text>'


def _ticks(largest: float) -> tuple[float, float]:
    """A round step, and the first multiple of it that nothing exceeds."""
    if largest <= 0:
        return 1.0, 1.0
    power = 10.0 ** np.floor(np.log10(largest / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * _TICKS >= largest)
    return float(step), float(step * np.ceil(largest / step - 1e-9))
