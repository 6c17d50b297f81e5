"""Admin REST of the cache service: health, metrics, statistics, trees, audits. For operators, not for tenants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from coppice import __version__
from coppice.addresses import Address
from coppice.errors import UnavailableError
from coppice_cache.edge.api.body_limit import BodyLimit
from coppice_cache.edge.api.inspection import Inspection
from coppice_cache.edge.api.inspection_http import add_inspection
from coppice_cache.edge.api.page import render
from coppice_cache.edge.service.service import IndexService


class Readiness:
    """Whether to send us work, and what is not as it should be."""

    def __init__(self, reasons: Callable[[], list[str]]) -> None:
        self._reasons = reasons
        self.is_serving = False

    def degraded(self) -> list[str]:
        return self._reasons()


LOOPBACK_NAMES = ("127.0.0.1", "localhost")


def build_app(service: IndexService, registry: CollectorRegistry, readiness: Readiness, *, host: str = "") -> FastAPI:
    """On loopback no other name is answered to: a page whose name was bent to this address must not read anything."""
    app = FastAPI(
        title="Coppice cache service", version=__version__, openapi_url="/openapi.json", docs_url=None, redoc_url=None
    )
    _add_health(app, service, registry, readiness)
    app.add_middleware(BodyLimit)
    if host in LOOPBACK_NAMES:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES), www_redirect=False)
    add_inspection(app, Inspection(service), service.auditor, error_response)
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
        return render(service.stats(), readiness.degraded(), service.auditor.last)


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


# ---- the server ----


class AdminServer:
    """Uvicorn in a thread of its own, on a socket that is bound before anything else starts."""

    def __init__(self, host: str, port: int, *, flag: str = "--http-port") -> None:
        family = Address(host, port).family
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: else no TCP_NODELAY
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint=f"choose another {flag}"
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
