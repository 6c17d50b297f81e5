"""The same front door over gRPC: `coppice_rpc.v1.Generation`, on the asyncio loop of the REST server.

    key -> deadline -> message -> answer

Every method takes its message as the first of a stream: the bytes are the same, and so nothing of a message is read
before its key and its deadline were looked at. A call without a deadline is refused: it would hold memory for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from coppice.telemetry.logs import REQUEST_ID
from coppice.telemetry.trace_context import context_from_metadata
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.base.auth import bearer_key
from coppice_scheduler.edge.base.errors import (
    CLIENT_CLOSED_STATUS,
    ApiError,
    ErrorKind,
    code_of,
    internal,
    invalid,
    status_of,
)
from coppice_scheduler.edge.base.request_id import HEADER, RequestId, request_id_of
from coppice_scheduler.edge.frontend.body_budget import Body
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.grpc.errors import abort
from coppice_scheduler.edge.grpc.messages import response_of, spec_of, tokenize_prompt
from coppice_scheduler.edge.http.rate_headers import rate_headers
from coppice_scheduler.edge.request_log.open_record import (
    Log,
    OpenRecord,
    begin,
    current_record,
)

log = logging.getLogger("coppice.scheduler.grpc")
SERVICE = "coppice_rpc.v1.Generation"
MESSAGE_TIMEOUT_S = 30.0  # as for the body of a REST request
READING_MAX = 16  # messages of one tenant that the library takes in at a time; it does not tell how much came of them

Context = grpc.aio.ServicerContext[Any, Any]
Answers = AsyncGenerator[Message, None]


@dataclass(frozen=True, slots=True)
class _Caller:
    tenant: Tenant
    context: Context
    body: Body
    request_id: RequestId


_Method = Callable[[Any, _Caller], Answers]


class Generation:
    """`handler` is for a grpc.aio server that runs in the loop of `frontdoor`'s engine."""

    def __init__(
        self, frontdoor: FrontDoor, *, message_timeout_s: float = MESSAGE_TIMEOUT_S, log: Log | None = None
    ) -> None:
        self._frontdoor = frontdoor
        self._log = log
        self._message_timeout_s = message_timeout_s
        self._reading: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(READING_MAX))

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, tuple[type[Message], _Method]] = {
            "Generate": (pb.GenerateRequest, self._generate),
            "ListModels": (pb.ListModelsRequest, self._list_models),
            "Tokenize": (pb.TokenizeRequest, self._tokenize),
            "Detokenize": (pb.DetokenizeRequest, self._detokenize),
            "Abort": (pb.AbortRequest, self._abort),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: self._guarded(name, *method) for name, method in methods.items()}
        )

    def _guarded(
        self, name: str, request_type: type[Message], method: _Method
    ) -> grpc.RpcMethodHandler[bytes, Message]:
        async def recorded(messages: AsyncIterator[bytes], context: Context) -> AsyncGenerator[Message, None]:
            request_id = _request_id_of(context)
            REQUEST_ID.set(request_id.shown)
            record = begin(OpenRecord(self._log, f"gRPC {name}", request_id.shown, str(context.peer())))
            status = CLIENT_CLOSED_STATUS
            try:
                async with aclosing(answer(messages, context, request_id)) as answers:
                    async for response in answers:
                        yield response
                status = 200
            finally:
                record.close(status)

        async def answer(
            messages: AsyncIterator[bytes], context: Context, request_id: RequestId
        ) -> AsyncGenerator[Message, None]:
            tenant = None
            context.set_trailing_metadata(((HEADER, request_id.shown),))
            try:
                tenant = self._tenant(context)
                self._frontdoor.count_call(tenant)
                if context.time_remaining() is None:
                    raise invalid("The call has no deadline; set one (a timeout).", code="no_deadline")
                with self._frontdoor.bodies.body(tenant) as body:
                    request = await self._read(messages, request_type, tenant, body)
                    async with aclosing(method(request, _Caller(tenant, context, body, request_id))) as answers:
                        async for response in answers:
                            yield response
                context.set_trailing_metadata(((HEADER, request_id.shown), *self._limits_left(tenant).items()))
            except ApiError as error:
                _refused(error)
                tenant_id = "" if tenant is None else tenant.id
                await abort(context, error, request_id, tenant_id, self._limits_left(tenant))
            except Exception:
                log.exception("a call failed")
                _refused(internal())
                await abort(context, internal(), request_id)

        return grpc.stream_stream_rpc_method_handler(recorded, response_serializer=_serialized)

    def _limits_left(self, tenant: Tenant | None) -> dict[str, str]:
        """By the names that REST has."""
        return {} if tenant is None else rate_headers(self._frontdoor.limits_left(tenant))

    async def _read(
        self, messages: AsyncIterator[bytes], request_type: type[Message], tenant: Tenant, body: Body
    ) -> Message:
        try:
            async with asyncio.timeout(self._message_timeout_s), self._reading[tenant.id]:
                data = await anext(messages)
        except TimeoutError:
            raise ApiError(
                ErrorKind.TIMEOUT,
                f"The message did not arrive within {self._message_timeout_s:g} s.",
                code="request_timeout",
            ) from None
        except StopAsyncIteration:
            raise invalid("The call has no message.", code="missing") from None
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(
                ErrorKind.TOO_LARGE, f"The request is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large"
            )
        body.add(data)
        try:
            return await self._frontdoor.read(tenant, body.take_bytes(), request_type.FromString)
        except DecodeError:
            raise invalid(f"The message is no {request_type.DESCRIPTOR.name}.", code="invalid_message") from None

    async def _generate(self, request: pb.GenerateRequest, caller: _Caller) -> Answers:
        spec = spec_of(request, max(caller.context.time_remaining() or 0.0, 1e-9))
        client = context_from_metadata(_metadata(caller.context))
        call = await self._frontdoor.open(caller.tenant, spec, client, caller.request_id)
        num_prompt_logprobs = spec.num_prompt_logprobs
        del spec
        caller.body.release()
        async with aclosing(call.deltas()) as deltas:
            async for delta in deltas:
                yield response_of(delta, self._frontdoor.token_texts, num_prompt_logprobs)

    async def _list_models(self, request: pb.ListModelsRequest, caller: _Caller) -> Answers:
        models = self._frontdoor.models_of(caller.tenant)
        yield pb.ListModelsResponse(models=[pb.Model(id=model.id, max_context=model.max_context) for model in models])

    async def _tokenize(self, request: pb.TokenizeRequest, caller: _Caller) -> Answers:
        model = self._frontdoor.check_model(caller.tenant, request.model)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        prompt = tokenize_prompt(request)
        tokens = await self._frontdoor.tokenize(caller.tenant, prompt, "prompt", add_special_tokens=adds)
        yield pb.TokenizeResponse(tokens=tokens, max_context=model.max_context)

    async def _detokenize(self, request: pb.DetokenizeRequest, caller: _Caller) -> Answers:
        self._frontdoor.check_model(caller.tenant, request.model)
        yield pb.DetokenizeResponse(text=await self._frontdoor.detokenize(caller.tenant, request.tokens, "tokens"))

    async def _abort(self, request: pb.AbortRequest, caller: _Caller) -> Answers:
        yield pb.AbortResponse(num_answers=await self._frontdoor.abort(caller.tenant, request.request_id))

    def _tenant(self, context: Context) -> Tenant:
        return self._frontdoor.tenant_of(bearer_key(_sent(context, "authorization") or ""))


def _refused(error: ApiError) -> None:
    record = current_record()
    record.failed(code_of(error))
    record.close(status_of(error))


def _serialized(response: Message) -> bytes:
    return response.SerializeToString()


def _request_id_of(context: Context) -> RequestId:
    return request_id_of(_sent(context, HEADER))


def _sent(context: Context, key: str) -> str | None:
    """The first value of this metadata key."""
    return next((value for name, value in _metadata(context) if name == key and isinstance(value, str)), None)


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    found = context.invocation_metadata() or ()
    return tuple((str(name), value) for name, value in found)
