"""Scripts of web pages: those of the origins that the operator names may call the REST API and read its answers.

A page has no key of its own accord: it sends what its user gave it, and no cookies are asked for.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from coppice_scheduler.edge.base.request_id import HEADER
from coppice_scheduler.edge.http.rate_headers import ALL_LIMITS, anthropic_rate_headers, rate_headers

# Besides what always is.
READABLE = (
    HEADER,
    "request-id",
    "x-coppice-ignored-fields",
    "idempotent-replayed",
    "retry-after",
    "retry-after-ms",
    *rate_headers(ALL_LIMITS),
    *anthropic_rate_headers(ALL_LIMITS, 0),
)


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """`origins`: `https://chat.example`, or `*` for any; none: browsers keep answers from all other pages."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=READABLE
    )
