"""The routes of the Anthropic API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request
from fastapi.responses import Response

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.anthropic.fields import MESSAGES
from coppice_scheduler.edge.anthropic.message import MessageShape
from coppice_scheduler.edge.anthropic.request import ParsedMessage, parse_count, parse_message
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.field_table import Reading, ignored_header
from coppice_scheduler.edge.http.generation import Generation, Surface
from coppice_scheduler.edge.http.request_ids import id_of
from coppice_scheduler.edge.http.requests import answer_to_body
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"


class MessagesApi:
    def __init__(self, frontdoor: FrontDoor, generation: Generation, reading: Reading, body_timeout_s: float) -> None:
        self._frontdoor = frontdoor
        self._generation = generation
        self._reading = reading
        self._body_timeout_s = body_timeout_s

    async def messages(self, request: Request) -> Response:
        request_id = id_of(request).shown

        def shape(call: Call, parsed: ParsedMessage) -> MessageShape:
            asked_tokens = parsed.spec.max_tokens or 0
            model = self._frontdoor.model.id
            return MessageShape(call, model, request_id, asked_tokens, shows_thinking=parsed.shows_thinking)

        return await self._generation.answer(request, Surface(MESSAGES, parse_message, shape))

    async def count_tokens(self, request: Request) -> Response:
        return await answer_to_body(self._frontdoor, request, self._body_timeout_s, self._counted)

    async def _counted(self, tenant: Tenant, raw: bytes) -> Response:
        model, chat, ignored = await self._frontdoor.read(tenant, raw, lambda raw: parse_count(raw, self._reading))
        self._frontdoor.check_model(tenant, model)
        tokens = await self._frontdoor.tokenize(tenant, chat, "messages", add_special_tokens=True)
        body = json.dumps({"input_tokens": len(tokens) // TOKEN_DTYPE.itemsize})
        return Response(body, media_type="application/json", headers=ignored_header(ignored))


def add_anthropic(
    app: FastAPI, frontdoor: FrontDoor, generation: Generation, reading: Reading, body_timeout_s: float
) -> None:
    api = MessagesApi(frontdoor, generation, reading, body_timeout_s)
    app.post(MESSAGES_PATH)(api.messages)
    app.post(COUNT_PATH)(api.count_tokens)
