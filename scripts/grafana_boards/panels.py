"""Panels, and how they are laid out: from left to right in rows of 24 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from coppice_scheduler.edge.request_log.exemplars import VALUES_S

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "prometheus"}
TRACES = "jaeger"
GREEN, ORANGE, RED = "green", "orange", "red"

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Link:
    title: str
    url: str


@dataclass(frozen=True)
class Panel:
    """`steps`: from which value on it is orange, and red; of one that falls, orange, and green. Where both are equal,
    it is never orange."""

    title: str
    text: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    stacks: bool = False
    steps: tuple[float, float] | None = None
    falls: bool = False  # more is better
    words: tuple[tuple[int, str], ...] = ()  # in place of these values
    links: tuple[Link, ...] = ()

    def json(self, number: int, x: int, y: int) -> Json:
        panel: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
        }
        if self.kind == "text":
            return {**panel, "description": "", "options": {"mode": "markdown", "content": self.text}}
        return {
            **panel,
            "datasource": SOURCE,
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
            "targets": [self._target(place, query) for place, query in enumerate(self.queries)],
        }

    def _target(self, place: int, query: Query) -> Json:
        target = {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
        }
        # All queries of a panel read the same histogram, and its dots are wanted once.
        has_exemplars = self.kind == "timeseries" and place == 0 and any(name in query.expr for name in VALUES_S)
        return {**target, "exemplar": True} if has_exemplars else target

    def _defaults(self) -> Json:
        found: Json = {"unit": self.unit, "min": 0, "noValue": "nothing yet"}
        if self.links:
            found["links"] = [{"title": link.title, "url": link.url} for link in self.links]
        if self.words:
            options = {str(value): {"text": text, "index": place} for place, (value, text) in enumerate(self.words)}
            found["mappings"] = [{"type": "value", "options": options}]
        if self.kind == "timeseries":
            stacking = {"mode": "normal" if self.stacks else "none", "group": "A"}
            found["custom"] = {"fillOpacity": 60 if self.stacks else 10, "showPoints": "never", "stacking": stacking}
        if self.steps is not None:
            first, second = self.steps
            colours = (RED, ORANGE, GREEN) if self.falls else (GREEN, ORANGE, RED)
            steps = [(None, colours[0]), (first, colours[1]), (second, colours[2])]
            if first == second:
                del steps[1]
            found["color"] = {"mode": "thresholds"}
            found["thresholds"] = {
                "mode": "absolute",
                "steps": [{"color": colour, "value": value} for value, colour in steps],
            }
        return found


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "background",
        "graphMode": "area",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
}


def stat(
    title: str,
    text: str,
    expr: str,
    *,
    unit: str = "short",
    steps: tuple[float, float] | None = None,
    falls: bool = False,
    words: tuple[tuple[int, str], ...] = (),
    legend: str = "",
) -> Panel:
    """One number that is good or bad."""
    return Panel(title, text, (Query(expr, legend),), "stat", unit, 4, 4, steps=steps, falls=falls, words=words)


def note(text: str, title: str = "About this board") -> Panel:
    """Draws no metric; its text says why it is there."""
    return Panel(title, text, (), "text", width=WIDTH, height=3)


def quantiles(metric: str, selector: str = "", by: str = "") -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram; with `by` p95 for each value of that label."""
    labels = f"le, {by}" if by else "le"
    rates = f"sum by ({labels}) (rate({metric}_bucket{selector}[$__rate_interval]))"
    if by:
        return (Query(f"histogram_quantile(0.95, {rates})", f"{{{{{by}}}}}"),)
    return tuple(Query(f"histogram_quantile({q}, {rates})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99))


def traces_link(tags: str) -> Link:
    """Explore, with the traces of the time that is shown."""
    query = {"refId": "A", "queryType": "search", "service": "coppice-scheduler", "tags": tags, "limit": 20}
    pane = {"datasource": TRACES, "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}
    return Link("Traces of this time", f"/explore?schemaVersion=1&panes={quote(json.dumps({'a': pane}), safe='${}')}")


@dataclass(frozen=True)
class Variable:
    """Values of a label; all of them until somebody chooses."""

    name: str
    metric: str

    def json(self) -> Json:
        query = f"label_values({self.metric}, {self.name})"
        return {
            "name": self.name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": "values"},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    panels: Sequence[Panel]
    variables: Sequence[Variable] = field(default_factory=tuple)

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["coppice"],
            "timezone": "browser",
            "schemaVersion": 39,
            "version": 1,
            "refresh": "5s",
            "time": {"from": "now-15m", "to": "now"},
            "editable": True,
            "graphTooltip": 1,
            "links": [
                {
                    "type": "dashboards",
                    "title": "Coppice",
                    "tags": ["coppice"],
                    "asDropdown": False,
                    "keepTime": True,
                    "includeVars": True,
                    "targetBlank": False,
                }
            ],
            "templating": {"list": [variable.json() for variable in self.variables]},
            "annotations": {"list": [_ALARMS]},
            "panels": list(_laid_out(self.panels)),
        }


_ALARMS = {
    "name": "Alarms",
    "datasource": SOURCE,
    "enable": True,
    "iconColor": RED,
    "expr": 'ALERTS{alertstate="firing"}',
    "titleFormat": "{{alertname}}",
    "step": "15s",
}


def _laid_out(panels: Iterable[Panel]) -> Iterable[Json]:
    x = y = row = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, row = 0, y + row, 0
        yield panel.json(number, x, y)
        x, row = x + panel.width, max(row, panel.height)
