"""The OpenAI-compatible REST API, with health and metrics beside it. Thin: everything real is in FrontDoor."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coppice import __version__
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, internal, not_ready
from coppice_scheduler.edge.frontend.body_budget import NO_ROOM_CODES
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.requests import caller_of
from coppice_scheduler.edge.http.sse import CLIENT_CLOSED_STATUS
from coppice_scheduler.edge.openai.bodies import model_body
from coppice_scheduler.edge.openai.generate import FIRST_BYTE_S, GenerateApi
from coppice_scheduler.edge.openai.openapi import document
from coppice_scheduler.edge.openai.parsing.fields import Reading, UnknownFields
from coppice_scheduler.edge.openai.tokens import TokensApi

BODY_TIMEOUT_S = 30.0
_READ = ["GET", "HEAD"]  # load balancers probe with HEAD
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
    app = FastAPI(title="Coppice", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_health(app, frontdoor, registry)
    _add_models(app, frontdoor)
    reading = Reading(frontdoor.model.max_context, unknown_fields, frontdoor.template_variables)
    generate = GenerateApi(frontdoor, body_timeout_s, first_byte_s, reading)
    tokens = TokensApi(frontdoor, body_timeout_s, reading)
    app.post("/v1/completions")(generate.completions)
    app.post("/v1/chat/completions")(generate.chat_completions)
    for prefix in ("", "/v1"):
        app.post(f"{prefix}/tokenize")(tokens.tokenize)
        app.post(f"{prefix}/detokenize")(tokens.detokenize)
    _add_document(app, frontdoor, has_metrics=registry is not None)
    return app


def _add_models(app: FastAPI, frontdoor: FrontDoor) -> None:
    async def list_models(request: Request) -> Response:
        caller_of(frontdoor, request)
        return JSONResponse({"object": "list", "data": [model_body(frontdoor.model)]})

    async def get_model(request: Request, model_id: str) -> Response:
        caller_of(frontdoor, request)
        frontdoor.check_model(model_id)
        return JSONResponse(model_body(frontdoor.model))

    app.api_route("/v1/models", methods=_READ)(list_models)
    app.api_route("/v1/models/{model_id:path}", methods=_READ)(get_model)


def _add_document(app: FastAPI, frontdoor: FrontDoor, *, has_metrics: bool) -> None:
    async def openapi() -> Response:
        model_id, variables = frontdoor.model.id, frontdoor.template_variables
        has_tools = bool(frontdoor.syntax.tools.format_name)
        return JSONResponse(document(__version__, model_id, variables, has_metrics=has_metrics, has_tools=has_tools))

    app.api_route("/openapi.json", methods=_READ)(openapi)


# --- errors, health -----------------------------------------------------------------------------------------------


def error_response(error: ApiError) -> Response:
    """OpenAI's error body; `Retry-After` in whole seconds, rounded up, and exactly in `retry-after-ms`."""
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.kind in (ErrorKind.TOO_LARGE, ErrorKind.TIMEOUT) or error.code in NO_ROOM_CODES:
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return JSONResponse(error.body(), status_code=error.kind.http_status, headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            path = request.url.path[:_SHOWN_CHARS]
            message = f"No such path: {request.method} {path}; /openapi.json has those that there are."
            return error_response(ApiError(ErrorKind.NOT_FOUND, message, code="not_found"))
        if error.status_code == 405:
            response = error_response(
                ApiError(ErrorKind.METHOD, f"{request.url.path} has no {request.method}.", code="method_not_allowed")
            )
            response.headers.update(error.headers or {})  # Allow
            return response
        body: dict[str, Any] = ApiError(ErrorKind.INVALID, str(error.detail)).body()
        return JSONResponse(body, status_code=error.status_code)

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_STATUS)

    async def on_bug(_: Request, error: Exception) -> Response:
        response = error_response(internal())
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

    app.api_route("/healthz", methods=_READ)(healthz)
    for path in ("/readyz", "/health"):  # the second is vLLM's
        app.api_route(path, methods=_READ)(readyz)
    if registry is not None:

        async def metrics() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        app.api_route("/metrics", methods=_READ)(metrics)
