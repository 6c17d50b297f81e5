"""What an operator may ask of the newest requests, on the port of the metrics.

GET /requests?limit=100&tenant=ID      {"requests": [the newest first]}
GET /requests/ID                       {"request": {...}, "why": ["waited 1.8 s for blocks: ...", ...]}

What it may ask of tenants: `tenants_page.py`.
"""

from __future__ import annotations

from urllib.parse import parse_qs, unquote

import msgspec

from coppice.request_log.causes import told
from coppice.request_log.reader import newest
from coppice.request_log.record import RequestRecord, stages_of
from coppice.telemetry.metrics_server import Page

REQUESTS_MAX = 1000
_PATH = "/requests"


class RequestPages:
    def __init__(self, folder: str) -> None:
        """`folder`: where front doors write records."""
        self._folder = folder

    def __call__(self, path: str, query: str) -> Page | None:
        """None: another path."""
        if path == _PATH:
            return self._listed(parse_qs(query))
        if path.startswith(f"{_PATH}/"):
            return self._one(unquote(path.removeprefix(f"{_PATH}/")))
        return None

    def _listed(self, query: dict[str, list[str]]) -> Page:
        limit = limit_of(query, 100, REQUESTS_MAX)
        if isinstance(limit, Page):
            return limit
        return json_page(200, {"requests": newest(self._folder, limit, tenant=query.get("tenant", [""])[-1])})

    def _one(self, asked: str) -> Page:
        found = newest(self._folder, 1, asked=asked)
        if not found:
            message = f"no request {asked[:100]!r} is among those that are kept; they are kept when they have ended"
            return _error(404, "request_not_found", message)
        return json_page(200, {"request": found[0], "why": why(found[0])})


def why(record: RequestRecord) -> list[str]:
    """What took its time, the longest first; of one that was refused, by what."""
    refused = [f"ended with {record.status} {record.end}"] if record.status >= 400 else []
    return refused + told(stages_of(record))


def limit_of(query: dict[str, list[str]], default: int, most: int) -> int | Page:
    """What `limit` says; a refusal of what is none from 1 to `most`."""
    limit = query.get("limit", [str(default)])[-1]
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:6]) <= most:
        return _error(400, "limit", f"limit is a number from 1 to {most}")
    return int(limit)


def _error(status: int, code: str, message: str) -> Page:
    return json_page(status, {"error": {"message": message, "code": code}})


def json_page(status: int, value: object) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n", "application/json")
