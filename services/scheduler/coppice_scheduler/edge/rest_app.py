"""The ASGI application of a front door: every API over REST; aborts, health and metrics beside them.

Thin: everything real is in FrontDoor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from coppice import __version__
from coppice.telemetry.traces import NO_TELEMETRY_OF_FASTAPI
from coppice_scheduler.edge.anthropic.errors import error_body
from coppice_scheduler.edge.anthropic.openapi import anthropic_routes
from coppice_scheduler.edge.anthropic.routes import MESSAGES_PATH, add_anthropic
from coppice_scheduler.edge.base.errors import CLIENT_CLOSED_STATUS, ApiError, ErrorKind, code_of, internal, not_ready
from coppice_scheduler.edge.base.tenant_model import ContextLimit
from coppice_scheduler.edge.frontend.body_budget import NO_ROOM_CODES
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.field_table import Reading, UnknownFields
from coppice_scheduler.edge.http.generation import FIRST_BYTE_S, Generation
from coppice_scheduler.edge.http.openapi.requests import request_routes
from coppice_scheduler.edge.http.openapi.routes import document
from coppice_scheduler.edge.http.rate_headers import RateHeaders
from coppice_scheduler.edge.http.request_ids import id_of
from coppice_scheduler.edge.http.requests import READ, caller_of
from coppice_scheduler.edge.openai.openapi import openai_routes
from coppice_scheduler.edge.openai.routes import add_openai
from coppice_scheduler.edge.request_log.open_record import current_record
from coppice_scheduler.edge.request_log.rest import UNRECORDED

BODY_TIMEOUT_S = 30.0
_APP: dict[str, Any] = {
    "docs_url": None,
    "redoc_url": None,
    "openapi_url": None,
    "telemetry": NO_TELEMETRY_OF_FASTAPI,
}
RETRY_BY_ITSELF_MS = 600_000
_SHOWN_CHARS = 200  # of a path that there is not


def create_app(
    frontdoor: FrontDoor,
    registry: CollectorRegistry | None,
    *,
    body_timeout_s: float = BODY_TIMEOUT_S,
    first_byte_s: float = FIRST_BYTE_S,
    unknown_fields: UnknownFields = UnknownFields.REFUSE,
) -> FastAPI:
    """The ASGI application of one front door. Without a registry it serves no /metrics: that names tenants."""
    app = FastAPI(title="Coppice", version=__version__, **_APP)
    app.add_middleware(RateHeaders, limits_left=frontdoor.limits_left, anthropic_path=MESSAGES_PATH)
    _add_error_handlers(app)
    _add_health(app, frontdoor, registry)
    _add_abort(app, frontdoor)
    reading = Reading(ContextLimit(frontdoor.model.max_context), unknown_fields, frontdoor.template_variables)
    generation = Generation(frontdoor, body_timeout_s, first_byte_s, reading)
    add_anthropic(app, frontdoor, generation, reading, body_timeout_s)
    add_openai(app, frontdoor, generation, reading, body_timeout_s)
    _add_document(app, frontdoor, has_metrics=registry is not None)
    return app


def apis_of(app: FastAPI) -> tuple[str, ...]:
    """Methods and routes, as records of requests name them; parts of a path that vary are in braces."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return tuple(
        f"{method} {route.path_format}"
        for route in routes
        if route.path not in UNRECORDED
        for method in sorted(route.methods or ())
    )


def _add_document(app: FastAPI, frontdoor: FrontDoor, *, has_metrics: bool) -> None:
    async def openapi() -> Response:
        model_id, variables = frontdoor.model.id, frontdoor.template_variables
        has_tools = bool(frontdoor.syntax.tools.format_name)
        return JSONResponse(description_of(model_id, variables, has_metrics=has_metrics, has_tools=has_tools))

    app.api_route("/openapi.json", methods=READ)(openapi)


def description_of(
    model_id: str, template_variables: frozenset[str], *, has_metrics: bool, has_tools: bool
) -> dict[str, Any]:
    """`/openapi.json` of a server that has one model, whose chat template reads these variables, and tools or not."""
    paths, schemas = openai_routes(model_id, template_variables, has_metrics=has_metrics, has_tools=has_tools)
    more_paths, more_schemas = anthropic_routes(model_id, has_tools=has_tools)
    abort_paths, abort_schemas = request_routes()
    paths |= {**more_paths, **abort_paths}
    return document(__version__, paths, {**schemas, **more_schemas, **abort_schemas})


def _add_abort(app: FastAPI, frontdoor: FrontDoor) -> None:
    async def abort(request: Request, request_id: str) -> Response:
        num_answers = await frontdoor.abort(caller_of(frontdoor, request), request_id)
        return JSONResponse({"id": request_id, "object": "request.aborted", "num_answers": num_answers})

    app.post("/v1/requests/{request_id}/abort")(abort)


# --- errors, health -----------------------------------------------------------------------------------------------


def error_response(error: ApiError, body: Mapping[str, Any] | None = None) -> Response:
    """`Retry-After` in whole seconds, rounded up, and exactly in `retry-after-ms`. The body is OpenAI's, or `body`."""
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if error.retry_after_ms > RETRY_BY_ITSELF_MS:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it again at once
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.kind in (ErrorKind.TOO_LARGE, ErrorKind.TIMEOUT) or error.code in NO_ROOM_CODES:
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return JSONResponse(body or error.body(), status_code=error.kind.http_status, headers=headers)


def _refusal(request: Request, error: ApiError) -> Response:
    """In the shape of the API that was called."""
    current_record().failed(code_of(error))
    is_anthropic = request.url.path.startswith(MESSAGES_PATH)
    return error_response(error, error_body(error, id_of(request).shown) if is_anthropic else None)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _refusal(request, error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            path = request.url.path[:_SHOWN_CHARS]
            message = f"No such path: {request.method} {path}; /openapi.json has those that there are."
            return _refusal(request, ApiError(ErrorKind.NOT_FOUND, message, code="not_found"))
        if error.status_code == 405:
            message = f"{request.url.path} has no {request.method}."
            response = _refusal(request, ApiError(ErrorKind.METHOD, message, code="method_not_allowed"))
            response.headers.update(error.headers or {})  # Allow
            return response
        response = _refusal(request, ApiError(ErrorKind.INVALID, str(error.detail)))
        response.status_code = error.status_code
        return response

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_STATUS)

    async def on_bug(request: Request, error: Exception) -> Response:
        response = _refusal(request, internal())
        response.headers["connection"] = "close"  # as the server does after it
        return response

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)


def _add_health(app: FastAPI, frontdoor: FrontDoor, registry: CollectorRegistry | None) -> None:
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    async def readyz() -> Response:
        if not frontdoor.ready:
            return error_response(not_ready())
        return PlainTextResponse("".join(f"{line}\n" for line in ("ready", *frontdoor.notes)))

    app.api_route("/healthz", methods=READ)(healthz)
    for path in ("/readyz", "/health"):  # the second is vLLM's
        app.api_route(path, methods=READ)(readyz)
    if registry is not None:

        async def metrics() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        app.api_route("/metrics", methods=READ)(metrics)
