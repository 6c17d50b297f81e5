"""The OpenAI-compatible REST API, with health and metrics beside it. Thin: everything real is in FrontDoor."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coppice import __version__
from coppice.telemetry import context_from_headers
from coppice_scheduler.edge.auth import bearer_key
from coppice_scheduler.edge.errors import ApiError, ErrorKind, model_not_found, not_ready
from coppice_scheduler.edge.frontdoor import Call, FrontDoor
from coppice_scheduler.edge.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.openai_bodies import Answer, Shape, model_body
from coppice_scheduler.edge.openai_schema import ParsedRequest, parse_chat, parse_completion
from coppice_scheduler.edge.sse import DONE, EventStream, event, unless_disconnected
from coppice_scheduler.edge.text_stream import NO_USAGE, Delta

BODY_TIMEOUT_S = 30.0
_CLIENT_CLOSED_STATUS = 499  # nobody reads it; access logs do
_READ = ["GET", "HEAD"]  # load balancers probe with HEAD

log = logging.getLogger("coppice.scheduler.http")


def create_app(
    frontdoor: FrontDoor, registry: CollectorRegistry | None, *, body_timeout_s: float = BODY_TIMEOUT_S
) -> FastAPI:
    """The ASGI application of one front door. Without a registry it serves no /metrics: that names tenants."""
    app = FastAPI(title="Coppice", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_health(app, frontdoor, registry)
    api = _Api(frontdoor, body_timeout_s)
    app.api_route("/v1/models", methods=_READ)(api.list_models)
    app.api_route("/v1/models/{model_id:path}", methods=_READ)(api.get_model)
    app.post("/v1/completions")(api.completions)
    app.post("/v1/chat/completions")(api.chat_completions)
    return app


class _Api:
    def __init__(self, frontdoor: FrontDoor, body_timeout_s: float) -> None:
        self._frontdoor = frontdoor
        self._body_timeout_s = body_timeout_s

    async def list_models(self, request: Request) -> Response:
        self._frontdoor.tenant_of(_bearer(request))
        return JSONResponse({"object": "list", "data": [model_body(self._frontdoor.model)]})

    async def get_model(self, request: Request, model_id: str) -> Response:
        self._frontdoor.tenant_of(_bearer(request))
        if model_id != self._frontdoor.model.id:
            raise model_not_found(model_id, self._frontdoor.model.id)
        return JSONResponse(model_body(self._frontdoor.model))

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, parse_chat)

    async def _generate(self, request: Request, parse: Callable[[bytes], ParsedRequest]) -> Response:
        tenant = self._frontdoor.tenant_of(_bearer(request))
        parsed = parse(await read_body(request, self._body_timeout_s))
        call = await self._frontdoor.open(tenant, parsed.spec, context_from_headers(request.headers))
        shape = Shape(
            call=call,
            model=self._frontdoor.model.id,
            created=int(time.time()),
            is_chat=parsed.spec.is_chat,
            presentation=parsed.presentation,
        )
        if parsed.presentation.stream:
            answer = await unless_disconnected(request.receive, lambda: _streamed(call, shape))
        else:
            answer = await unless_disconnected(request.receive, lambda: _whole(call, shape))
        return answer if answer is not None else Response(status_code=_CLIENT_CLOSED_STATUS)


async def _whole(call: Call, shape: Shape) -> Response:
    answers = [Answer() for _ in call.prompts]
    async with aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            answers[delta.index].add(delta)
    body = json.dumps(shape.whole(answers), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, media_type="application/json", headers={"x-request-id": call.call_id})


async def _streamed(call: Call, shape: Shape) -> Response:
    """Waits for the first delta, so that a refusal still gets its own status instead of an event after a 200."""
    deltas = call.deltas()
    try:
        first = await anext(deltas)
    except BaseException:
        await deltas.aclose()
        raise
    return EventStream(_events(first, deltas, shape), {"x-request-id": call.call_id})


async def _events(first: Delta, deltas: AsyncGenerator[Delta, None], shape: Shape) -> AsyncGenerator[bytes, None]:
    usage = NO_USAGE
    seen: set[int] = set()
    async with aclosing(deltas):
        try:
            if shape.is_chat:
                yield event(shape.role_chunk())
            delta: Delta | None = first
            while delta is not None:
                usage += delta.ending.usage if delta.ending is not None else NO_USAGE
                if delta.text or delta.ending is not None or shape.presentation.return_token_ids:
                    yield event(shape.delta_chunk(delta, is_first=delta.index not in seen))
                    seen.add(delta.index)
                delta = await anext(deltas, None)
        except ApiError as error:
            yield event(error.body())
            return
        except Exception:
            log.exception("a stream failed")
            yield event(_internal().body())
            return
        if shape.presentation.include_usage:
            yield event(shape.usage_chunk(usage))
        yield DONE


# --- requests -----------------------------------------------------------------------------------------------------


def _bearer(request: Request) -> str | None:
    return bearer_key(request.headers.get("authorization", ""))


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The whole body, bounded in bytes and time. Raises ApiError."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(
            ErrorKind.TIMEOUT, f"The body did not arrive within {timeout_s:g} s.", code="request_timeout"
        ) from None
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(ErrorKind.TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")


# --- errors, health -----------------------------------------------------------------------------------------------


def error_response(error: ApiError) -> Response:
    """OpenAI's error body; `Retry-After` in whole seconds, rounded up, and exactly in `retry-after-ms`."""
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.kind in (ErrorKind.TOO_LARGE, ErrorKind.TIMEOUT):
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return JSONResponse(error.body(), status_code=error.kind.http_status, headers=headers)


def _internal() -> ApiError:
    return ApiError(ErrorKind.INTERNAL, "The server failed on this request. It has been logged.", code="internal")


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return error_response(
                ApiError(ErrorKind.NOT_FOUND, f"No such path: {request.method} {request.url.path}", code="not_found")
            )
        if error.status_code == 405:
            response = error_response(
                ApiError(ErrorKind.METHOD, f"{request.url.path} has no {request.method}.", code="method_not_allowed")
            )
            response.headers.update(error.headers or {})  # Allow
            return response
        body: dict[str, Any] = ApiError(ErrorKind.INVALID, str(error.detail)).body()
        return JSONResponse(body, status_code=error.status_code)

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_STATUS)

    async def on_bug(_: Request, error: Exception) -> Response:
        return error_response(_internal())

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)


def _add_health(app: FastAPI, frontdoor: FrontDoor, registry: CollectorRegistry | None) -> None:
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    async def readyz() -> Response:
        return PlainTextResponse("ready\n") if frontdoor.ready else error_response(not_ready())

    app.api_route("/healthz", methods=_READ)(healthz)
    app.api_route("/readyz", methods=_READ)(readyz)
    if registry is not None:

        async def metrics() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        app.api_route("/metrics", methods=_READ)(metrics)
