"""REST of an advisory index: who has how much of a prompt, what the sources are at, health, metrics."""

from __future__ import annotations

import html
import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

from coppice import __version__
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.traces import NO_TELEMETRY_OF_FASTAPI
from coppice_cache.edge.api.admin_http import error_response
from coppice_cache.edge.api.body_limit import BodyLimit
from coppice_cache.engine_index.core.keys import lora_tag, salt_tag
from coppice_cache.engine_index.ingest import Ingest

MATCH_FIELDS = {"tokens": list, "lora_name": str, "lora_id": int, "cache_salt": str, "sources": list}


class MatchRefused(ValueError):
    """A question that is none; the text says which field."""


def build_ingest_app(ingest: Ingest) -> FastAPI:
    app = FastAPI(
        telemetry=NO_TELEMETRY_OF_FASTAPI,
        title="Coppice advisory index",
        version=__version__,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    registry = CollectorRegistry()
    registry.register(BuildInfo("index"))
    registry.register(IngestMetrics(ingest))
    app.add_middleware(BodyLimit)
    _add_health(app, ingest, registry)
    _add_questions(app, ingest)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _http_error)
    return app


def _add_health(app: FastAPI, ingest: Ingest, registry: CollectorRegistry) -> None:
    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> Response:
        return PlainTextResponse("ok\n" if ingest.failure is None else "broken\n", 200 if not ingest.failure else 500)

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        if ingest.failure is not None:
            return JSONResponse({"status": "not serving", "reasons": ingest.problems()}, 503)
        problems = ingest.problems()
        return JSONResponse({"status": "degraded" if problems else "ready", "reasons": problems})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return _page(ingest)


def _add_questions(app: FastAPI, ingest: Ingest) -> None:
    @app.post("/v1/match")
    async def match(request: Request) -> JSONResponse:
        """{"tokens": [ids], "lora_name"?, "lora_id"?, "cache_salt"?, "sources"?: [names]}"""
        body = await request.body()
        try:
            return JSONResponse(_answer(ingest, _fields(body)))
        except MatchRefused as refused:
            return error_response(400, str(refused), "invalid_parameter")

    @app.get("/v1/sources")
    def sources() -> dict[str, Any]:
        return {
            "sources": [asdict(source) for source in ingest.sources()],
            "nodes": ingest.num_nodes,
            "malformed_frames": ingest.num_malformed_frames,
        }


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MatchRefused(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MatchRefused('the body must be an object with "tokens"')
    for name, value in fields.items():
        kind = MATCH_FIELDS.get(name)
        if kind is None:
            raise MatchRefused(f"{name[:64]}: unknown; known are {', '.join(MATCH_FIELDS)}")
        if value is not None and type(value) is not kind:
            raise MatchRefused(f"{name}: must be of type {kind.__name__}")
    if fields.get("tokens") is None:
        raise MatchRefused("tokens: missing; expected a list of token ids")
    return fields


def _answer(ingest: Ingest, fields: dict[str, Any]) -> dict[str, Any]:
    if bool in set(map(type, fields["tokens"])):
        raise MatchRefused("tokens: must be unsigned 32-bit integers: a boolean is none")
    try:
        tokens = array("I", fields["tokens"]).tobytes()
    except (TypeError, OverflowError) as error:
        raise MatchRefused(f"tokens: must be unsigned 32-bit integers: {error}") from error
    only = fields.get("sources")
    statuses = ingest.sources()
    if only is not None:
        known = [status.source for status in statuses]
        unknown = [name for name in only if name not in known]
        if unknown:
            raise MatchRefused(f"sources: {str(unknown[0])[:64]!r} is unknown; GET /v1/sources lists them")
    lora = lora_tag(fields.get("lora_name"), fields.get("lora_id"))
    hits = ingest.match(tokens, lora, salt_tag(fields.get("cache_salt")), only)
    withheld = sorted({s.source for s in statuses if not s.is_trusted and (only is None or s.source in only)})
    return {"num_tokens": len(tokens) // 4, "matches": [asdict(hit) for hit in hits], "withheld": withheld}


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 400
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return error_response(status, f"{request.method} {request.url.path}: {detail}", "http_error")


def _page(ingest: Ingest) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(source.source)}<td>{source.dp_rank}<td>{html.escape(source.model)}"
        f"<td>{_state(source.is_connected, source.is_trusted)}<td>{source.next_sequence}<td>{source.counts.gaps}"
        f"<td>{source.counts.restarts}<td>{source.blocks.blocks}<td>{source.blocks.orphan_blocks}"
        f"<td>{source.blocks.withheld_blocks}</tr>"
        for source in ingest.sources()
    )
    problems = html.escape("; ".join(ingest.problems())) or "all sources are followed"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Coppice advisory index</title>"
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>"
        f"<h1>Coppice advisory index</h1><p>{problems}</p>"
        "<table><tr><th>source<th>rank<th>model<th>state<th>next message<th>gaps<th>restarts<th>blocks"
        f"<th>without parent<th>withheld</tr>{rows}</table>"
        "<p><a href=/v1/sources>sources</a> · <a href=/metrics>metrics</a> · <a href=/openapi.json>API</a></p>"
    )


def _state(is_connected: bool, is_trusted: bool) -> str:
    if not is_connected:
        return "not connected"
    return "followed" if is_trusted else "recovering"


class IngestMetrics(Collector):
    """Per source; there are at most as many as engines."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest

    def describe(self) -> Iterable[Metric]:
        """Empty: registering must not ask anybody."""
        return ()

    def collect(self) -> Iterable[Metric]:
        sources = self._ingest.sources()
        labels = [(source.source, str(source.dp_rank)) for source in sources]
        gauges: dict[str, tuple[str, Callable[[Any], float]]] = {
            "blocks": ("Blocks that the source holds.", lambda s: s.blocks.blocks),
            "orphan_blocks": ("Blocks whose parent is not known.", lambda s: s.blocks.orphan_blocks),
            "trusted": ("1 when its blocks are answered with, 0 while it recovers.", lambda s: s.is_trusted),
            "connected": ("1 when its publisher is connected.", lambda s: s.is_connected),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"coppice_ingest_{name}", text, labels=["source", "dp_rank"])
            for label, source in zip(labels, sources, strict=True):
                gauge.add_metric(label, value(source))
            yield gauge
        for name in ("messages", "gaps", "restarts", "duplicates", "unreadable", "replays", "clears"):
            counter = CounterMetricFamily(
                f"coppice_ingest_{name}", f"Of the source's stream: {name}.", labels=["source", "dp_rank"]
            )
            for label, source in zip(labels, sources, strict=True):
                counter.add_metric(label, getattr(source.counts, name))
            yield counter
        yield GaugeMetricFamily("coppice_ingest_nodes", "Nodes of the tree.", value=self._ingest.num_nodes)
