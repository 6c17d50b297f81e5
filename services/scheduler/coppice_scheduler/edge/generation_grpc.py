"""The same front door over gRPC: `coppice_rpc.v1.Generation`, on the asyncio loop of the REST server.

Errors carry google.rpc.Status details: ErrorInfo (reason = the code that REST has), RetryInfo where a time is known,
QuotaFailure where a tenant's own limit was hit. A call without a deadline is refused: it would hold memory for ever.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from coppice.telemetry import context_from_metadata
from coppice.tenants import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from coppice_scheduler.core.request import OutputErrorCode, RefusedReason
from coppice_scheduler.edge.auth import bearer_key
from coppice_scheduler.edge.chat import ChatMessage
from coppice_scheduler.edge.errors import ApiError, ErrorKind, invalid
from coppice_scheduler.edge.frontdoor import FrontDoor
from coppice_scheduler.edge.generation_spec import (
    MAX_BODY_BYTES,
    ChatPrompt,
    GenerationSpec,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from coppice_scheduler.edge.text_stream import Delta

log = logging.getLogger("coppice.scheduler.grpc")

_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.METHOD: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
_QUOTA_CODES = frozenset(
    {
        RefusedReason.TENANT_CONCURRENCY.value,
        RefusedReason.TENANT_QUEUE.value,
        OutputErrorCode.TENANT_MAXIMUM.value,
    }
)


class GenerationServicer(pb_grpc.GenerationServicer):
    """Register on a grpc.aio server that runs in the loop of `frontdoor`'s engine."""

    def __init__(self, frontdoor: FrontDoor) -> None:
        self._frontdoor = frontdoor

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: pb_grpc._ServicerContext,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        try:
            tenant = self._tenant(context)
            if context.time_remaining() is None:
                raise invalid("The call has no deadline; set one (a timeout).", code="no_deadline")
            parent = context_from_metadata(_metadata(context))
            call = await self._frontdoor.open(tenant, spec_of(request), parent)
            async with aclosing(call.deltas()) as deltas:
                async for delta in deltas:
                    yield _response(delta)
        except ApiError as error:
            await _abort(context, error)
        except Exception:
            log.exception("a call failed")
            await _abort(context, ApiError(ErrorKind.INTERNAL, "The server failed on this call.", code="internal"))

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: pb_grpc._ServicerContext,
    ) -> pb.ListModelsResponse:
        try:
            self._tenant(context)
        except ApiError as error:
            await _abort(context, error)
        model = self._frontdoor.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.id, max_context=model.max_context)])

    def _tenant(self, context: pb_grpc._ServicerContext) -> Tenant:
        values = [value for name, value in _metadata(context) if name == "authorization" and isinstance(value, str)]
        return self._frontdoor.tenant_of(bearer_key(values[0] if values else ""))


def spec_of(request: pb.GenerateRequest) -> GenerationSpec:
    """Raises ApiError."""
    if request.ByteSize() > MAX_BODY_BYTES:
        raise ApiError(
            ErrorKind.TOO_LARGE, f"The request is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large"
        )
    if not request.model:
        raise invalid("model is required.", param="model", code="missing")

    def given(name: str) -> bool:
        return request.HasField(name)  # type: ignore[arg-type]

    return GenerationSpec(
        model=request.model,
        prompts=(_prompt(request),),
        max_tokens=request.max_tokens if given("max_tokens") else None,
        temperature=request.temperature if given("temperature") else None,
        top_p=request.top_p if given("top_p") else None,
        top_k=request.top_k if given("top_k") else None,
        seed=request.seed if given("seed") else None,
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "token_ids":
        return TokenPrompt(request.token_ids.tokens)
    if kind == "chat":
        return ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in request.chat.messages))
    raise invalid("prompt is required: text, token_ids or chat.", param="prompt", code="missing")


def _response(delta: Delta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(text=delta.text, tokens=delta.tokens)
    if delta.ending is not None:
        response.finish_reason = delta.ending.reason
        usage = delta.ending.usage
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.cached_tokens = usage.cached_tokens
        response.usage.completion_tokens = usage.completion_tokens
    return response


def _metadata(context: pb_grpc._ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    found = context.invocation_metadata() or ()
    return tuple((str(name), value) for name, value in found)


async def _abort(
    context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse], error: ApiError
) -> NoReturn:
    code = _CODES[error.kind]
    status = status_pb2.Status(code=code.value[0], message=error.message, details=map(_packed, _details(error)))
    trailing: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if error.retry_after_ms:
        trailing.append(("retry-after-ms", str(error.retry_after_ms)))
    await context.abort(code, error.message, tuple(trailing))
    raise AssertionError("abort raises")


def _details(error: ApiError) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.code or error.kind.name.lower(), domain="coppice")
    if error.param is not None:
        info.metadata["param"] = error.param
    details: list[Message] = [info]
    if error.retry_after_ms:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.code in _QUOTA_CODES:
        violation = error_details_pb2.QuotaFailure.Violation(subject="tenant", description=error.message)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    return details


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
