"""Admin REST of the cache service: health, metrics, statistics, trees, audits. For operators, not for tenants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice import __version__
from coppice.addresses import Address
from coppice.audit_log import Act, AuditLog
from coppice.errors import UnavailableError
from coppice.processes.prompt_uvicorn import PromptServer
from coppice.telemetry.traces import NO_TELEMETRY_OF_FASTAPI
from coppice.tenants.watch import TenantsWatch
from coppice.tls.credentials import Credentials
from coppice.tls.entrance import Handshakes, TlsEntrance, behind_tls
from coppice_cache.edge.api.body_limit import BodyLimit
from coppice_cache.edge.api.console import NOWHERE_ELSE, Elsewhere, add_console
from coppice_cache.edge.api.guard import PEER, Guard
from coppice_cache.edge.api.http_protocol import AdminProtocol
from coppice_cache.edge.api.inspection import Inspection
from coppice_cache.edge.api.inspection_http import ACT, add_inspection
from coppice_cache.edge.service.service import IndexService


class Readiness:
    """Whether to send us work, and what is not as it should be."""

    def __init__(self, reasons: Callable[[], list[str]], tenants: TenantsWatch | None = None) -> None:
        self._reasons = reasons
        self._tenants = tenants
        self.is_serving = False

    def versions(self) -> dict[str, str]:
        """Of the tenants file that counts, where there is one."""
        return {"tenants_version": self._tenants.directory.version} if self._tenants is not None else {}

    def degraded(self) -> list[str]:
        return self._reasons()


def build_app(
    service: IndexService,
    registry: CollectorRegistry,
    readiness: Readiness,
    *,
    names: Iterable[str] = (),
    audit: AuditLog | None = None,
    wants_operators: bool = False,
    elsewhere: Elsewhere = NOWHERE_ELSE,
) -> FastAPI:
    """`names` are answered to beside addresses and localhost. Without `audit` acts go to the log. `wants_operators`:
    TLS says who asks. `elsewhere`: what the console asks besides."""
    app = FastAPI(
        telemetry=NO_TELEMETRY_OF_FASTAPI,
        title="Coppice cache service",
        version=__version__,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    _add_health(app, service, registry, readiness)
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, names=names, refuse=error_response, wants_operators=wants_operators)
    app.add_middleware(Audited, log=audit or AuditLog("cache"))  # around the guard: what it refuses has a line, too
    add_inspection(app, Inspection(service), service.auditor, error_response)
    add_console(app, elsewhere)
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
            return JSONResponse({"status": "not serving", "reasons": reasons, **readiness.versions()}, 503)
        return JSONResponse({"status": "degraded" if reasons else "ready", "reasons": reasons, **readiness.versions()})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


# ---- the audit log ----


class Audited:
    """Middleware: a line for each request of a route that is no mere question (GET, HEAD), also if it is refused."""

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = _act_wanted(scope)
        if verb is None:
            return await self._app(scope, receive, send)
        host, port = scope.get("client") or ("", 0)
        act = scope[ACT] = Act(verb, str(scope.get(PEER) or f"{host}:{port}"), "REST")
        status = 500  # of what ends without an answer

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            has_found = "holds" in act.facts  # an audit was done, also one that answers 500 for what it found
            self._log.ended(act, done=status < 400 or has_found, code=str(status))


def _act_wanted(scope: Scope) -> str | None:
    """Name of the route's function, if a request wants more than to read."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
        return None
    for route in scope["app"].routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            return str(found["endpoint"].__name__)
    return None


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

CONNECTIONS_MAX = 512  # with one more, all are told 503 until some are gone; none stays long without asking
TLS_CONNECTIONS_MAX = 2 * CONNECTIONS_MAX  # in all: above it nobody is told anything
HANDSHAKES_MAX = 128  # at once; above it whoever has been at it longest is cut


class AdminServer:
    """Uvicorn in a thread of its own, on a socket that is bound before anything else starts. With `tls`, it
    asks for certificates."""

    def __init__(self, host: str, port: int, *, flag: str = "--http-port", tls: Credentials | None = None) -> None:
        self._tls = tls
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
            app,
            http=AdminProtocol if self._tls is None else _behind_tls(self._tls),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=CONNECTIONS_MAX,
        )
        self._server = PromptServer(config)
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


def _behind_tls(tls: Credentials) -> Callable[..., TlsEntrance]:
    handshakes = Handshakes(lambda: tls.channel(is_server=True), TLS_CONNECTIONS_MAX, HANDSHAKES_MAX)
    return behind_tls(AdminProtocol, handshakes)
