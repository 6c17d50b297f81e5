"""Admin REST of the cache service: health, metrics, statistics, trees, audits. For operators, not for tenants."""

from __future__ import annotations

import html
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from coppice import __version__
from coppice.errors import UnavailableError
from coppice.ids import DomainId
from coppice_cache.core.results import IndexStats, TreeDump
from coppice_cache.edge.service import IndexService

DEPTH_DEFAULT, DEPTH_MAX = 8, 64
NODES_DEFAULT, NODES_MAX = 256, 4_096


class Readiness:
    """Whether to send us work, and what is not as it should be."""

    def __init__(self, reasons: Callable[[], list[str]]) -> None:
        self._reasons = reasons
        self.is_serving = False

    def degraded(self) -> list[str]:
        return self._reasons()


def build_app(service: IndexService, registry: CollectorRegistry, readiness: Readiness) -> FastAPI:
    app = FastAPI(
        title="Coppice cache service", version=__version__, openapi_url="/openapi.json", docs_url=None, redoc_url=None
    )
    _add_health(app, service, registry, readiness)
    _add_views(app, service)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


def _add_health(app: FastAPI, service: IndexService, registry: CollectorRegistry, readiness: Readiness) -> None:
    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        return "ok\n"

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        reasons = readiness.degraded()
        if not readiness.is_serving:
            return JSONResponse({"status": "not serving", "reasons": reasons}, 503)
        return JSONResponse({"status": "degraded" if reasons else "ready", "reasons": reasons})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return _page(service.stats(), readiness)


def _add_views(app: FastAPI, service: IndexService) -> None:
    @app.get("/v1/stats")
    def stats() -> dict[str, Any]:
        return asdict(service.stats())

    @app.get("/v1/domains/{domain:path}/tree")
    def tree(
        domain: str,
        max_depth: Annotated[int, Query(ge=0, le=DEPTH_MAX)] = DEPTH_DEFAULT,
        limit: Annotated[int, Query(ge=1, le=NODES_MAX)] = NODES_DEFAULT,
    ) -> JSONResponse:
        if not _is_known(service, domain):
            return error_response(404, f"no domain {domain!r} is configured or in use", "domain_not_found")
        return JSONResponse(_tree_json(service.tree(DomainId(domain), max_depth=max_depth, limit=limit)))

    @app.post("/v1/audit")
    def audit() -> JSONResponse:
        found = service.audit()
        return JSONResponse(asdict(found), 200 if found.holds else 500)


def _is_known(service: IndexService, domain: str) -> bool:
    if any(config.domain == domain for config in service.settings.domains):
        return True
    return any(use.domain == domain for worker in service.stats().workers for use in worker.domains)


def _tree_json(dump: TreeDump) -> dict[str, Any]:
    trees = [
        {
            "worker_id": view.worker_id,
            "namespace": view.namespace.hex(),
            "nodes": [asdict(node) for node in view.nodes],
        }
        for view in dump.trees
    ]
    return {"domain": dump.domain, "truncated": dump.truncated, "trees": trees}


# ---- errors ----


def error_response(status: int, message: str, code: str) -> JSONResponse:
    """The shape that clients of OpenAI's API expect."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}", "http_error")


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
    return error_response(400, problems, "invalid_parameter")


# ---- the page ----


def _page(stats: IndexStats, readiness: Readiness) -> str:
    reasons = "; ".join(readiness.degraded())
    state = f"degraded: {html.escape(reasons)}" if reasons else "ready"
    rows = "".join(
        f"<tr><td>{html.escape(worker.worker_id)}<td>{'open' if worker.open else 'recovering'}"
        f"<td>{worker.num_blocks}<td>{worker.free_blocks}<td>{worker.leased_blocks}<td>{worker.cached_blocks}"
        f"<td>{worker.draining_blocks}<td>{worker.leases}<td>{worker.fences}</tr>"
        for worker in stats.workers
    )
    share = f"{stats.hit_tokens / stats.query_tokens:.1%}" if stats.query_tokens else "no queries yet"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Coppice cache</title>"
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>"
        f"<h1>Coppice cache</h1><p>{state} · epoch {stats.cache_epoch} · sessions: {stats.sessions} · "
        f"leases: {stats.leases} · cached share of looked-up tokens: {share}</p>"
        "<table><tr><th>worker<th>ledger<th>blocks<th>free<th>leased<th>cached<th>draining<th>leases<th>fences</tr>"
        f"{rows}</table>"
        "<p><a href=/v1/stats>stats</a> · <a href=/metrics>metrics</a> · <a href=/openapi.json>API</a></p>"
    )


# ---- the server ----


class AdminServer:
    """Uvicorn in a thread of its own, on a socket that is bound before anything else starts."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --http-port"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._socket.listen()  # whoever asks before the thread is up waits instead of being refused
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="admin http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=5)
        self._socket.close()
