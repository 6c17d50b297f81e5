"""What queries of boards and rules ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from scripts.grafana_boards.__main__ import BOARDS, FOLDER

_NAME = re.compile(r"\b(?:(?:vllm|coppice|gen_ai)[:_][a-z0-9_:]+|up)\b")


def metric_names(expression: str) -> set[str]:
    """Names of series in a PromQL expression."""
    return set(_NAME.findall(re.sub(r'"[^"]*"', "", expression)))


def boards() -> dict[str, dict[str, Any]]:
    """The boards as Grafana reads them, by file."""
    return {name: json.loads((FOLDER / name).read_text()) for name in BOARDS}


def panels(kind: str = "") -> list[dict[str, Any]]:
    return [panel for board in boards().values() for panel in board["panels"] if not kind or panel["type"] == kind]


def targets() -> Iterator[tuple[str, str, str]]:
    """Board, panel, query."""
    for board in boards().values():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield board["title"], panel["title"], target["expr"]
