"""The report of `coppice bench split` as a picture: what each stack gave by the length of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice_bench.serve.plot import Panel, Series, draw

_PANELS = (
    ("took_ms", "from one token to the next, ms"),
    ("ttft_ms", "first token under load, ms"),
    ("idle_ttft_ms", "first token with nothing else at work, ms"),
)


def write_split_plot(path: Path, report: dict[str, Any]) -> None:
    """Raises UsageError when the file cannot be written."""
    panels = [Panel(title, "length of a step, ms", _series(report["cases"], key)) for key, title in _PANELS]
    try:
        path.write_text(draw(f"{report['streams']} streams, medians of {report['rounds']} rounds", panels), "utf-8")
    except OSError as error:
        raise UsageError(f"--plot {path} cannot be written: {error.strerror}") from None


def _series(cases: list[dict[str, Any]], key: str) -> tuple[Series, ...]:
    by_stack: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        by_stack.setdefault(case["stack"], []).append(case)
    return tuple(
        Series(name, [case["step_ms"] for case in rows], [case[key] for case in rows], is_line=True)
        for name, rows in by_stack.items()
    )
