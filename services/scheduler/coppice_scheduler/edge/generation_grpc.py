"""The same front door over gRPC: `coppice_rpc.v1.Generation`, on the asyncio loop of the REST server.

A call without a deadline is refused: it would hold memory for ever. The deadline goes to the engine with the request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from coppice.telemetry import context_from_metadata
from coppice.tenants import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from coppice_scheduler.edge.auth import bearer_key
from coppice_scheduler.edge.errors import ApiError, internal, invalid
from coppice_scheduler.edge.frontdoor import FrontDoor
from coppice_scheduler.edge.generation_errors import abort
from coppice_scheduler.edge.generation_messages import check_size, response_of, spec_of, tokenize_prompt
from coppice_scheduler.edge.tokenizer import pack_tokens

log = logging.getLogger("coppice.scheduler.grpc")


class GenerationServicer(pb_grpc.GenerationServicer):
    """Register on a grpc.aio server that runs in the loop of `frontdoor`'s engine."""

    def __init__(self, frontdoor: FrontDoor) -> None:
        self._frontdoor = frontdoor

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: pb_grpc._ServicerContext,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        tenant_id = ""
        try:
            tenant = self._tenant(context)
            tenant_id = tenant.id
            timeout_s = context.time_remaining()
            if timeout_s is None:
                raise invalid("The call has no deadline; set one (a timeout).", code="no_deadline")
            parent = context_from_metadata(_metadata(context))
            call = await self._frontdoor.open(tenant, spec_of(request, max(timeout_s, 1e-9)), parent)
            async with aclosing(call.deltas()) as deltas:
                async for delta in deltas:
                    yield response_of(delta, self._frontdoor.token_texts)
        except ApiError as error:
            await abort(context, error, tenant_id)
        except Exception:
            log.exception("a call failed")
            await abort(context, internal())

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: pb_grpc._ServicerContext,
    ) -> pb.ListModelsResponse:
        try:
            self._tenant(context)
        except ApiError as error:
            await abort(context, error)
        model = self._frontdoor.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.id, max_context=model.max_context)])

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: pb_grpc._ServicerContext,
    ) -> pb.TokenizeResponse:
        try:
            self._tenant(context)
            self._frontdoor.check_model(request.model)
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
            tokens = await self._frontdoor.tokenize(tokenize_prompt(request), "prompt", add_special_tokens=adds)
        except ApiError as error:
            await abort(context, error)
        return pb.TokenizeResponse(tokens=pack_tokens(tokens), max_context=self._frontdoor.model.max_context)

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: pb_grpc._ServicerContext,
    ) -> pb.DetokenizeResponse:
        try:
            self._tenant(context)
            check_size(request)
            self._frontdoor.check_model(request.model)
            return pb.DetokenizeResponse(text=await self._frontdoor.detokenize(request.tokens, "tokens"))
        except ApiError as error:
            await abort(context, error)

    def _tenant(self, context: pb_grpc._ServicerContext) -> Tenant:
        values = [value for name, value in _metadata(context) if name == "authorization" and isinstance(value, str)]
        return self._frontdoor.tenant_of(bearer_key(values[0] if values else ""))


def _metadata(context: pb_grpc._ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    found = context.invocation_metadata() or ()
    return tuple((str(name), value) for name, value in found)
