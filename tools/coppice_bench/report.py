"""What a measurement prints: one JSON line, or lines for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from coppice import compiled
from coppice.versions import describe_machine

_DIGITS = 3


def note(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def warn_if_busy() -> None:
    """Threads that wait for each other make times meaningless where others use the cores, too."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        note(f"load average {load:.1f} on {cores} cores: times of several threads will mean little")


def describe_run() -> dict[str, Any]:
    """When and on what, whether with compiled cores, and how busy the machine was when the run ended."""
    loads = [round(load, 2) for load in os.getloadavg()]
    date, cores = datetime.now(UTC).isoformat(timespec="seconds"), compiled.kinds()
    return {"date": date, "load_average": loads, "cores": cores, **describe_machine()}


def rounded(value: Any) -> Any:
    """The same tree with floats of a few digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if abs(value) < 100 else round(value, 1)
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(rounded(report)) if as_json else "\n".join(_lines(rounded(report))), flush=True)


def _lines(report: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in report.items():
        if isinstance(value, dict):
            yield f"{indent}{key}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}"
            for item in value:
                yield indent + "  " + "  ".join(f"{name} {shown}" for name, shown in item.items())
        else:
            yield f"{indent}{key:{max(1, 24 - len(indent))}} {value}"
