"""`/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

from __future__ import annotations

import time

from fastapi import Request
from fastapi.responses import Response

from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.generation import Generation, Surface
from coppice_scheduler.edge.openai.bodies import Shape
from coppice_scheduler.edge.openai.parsing.fields import CHAT, COMPLETION
from coppice_scheduler.edge.openai.parsing.schema import ParsedRequest, parse_chat, parse_completion
from coppice_scheduler.edge.openai.responses.fields import RESPONSES
from coppice_scheduler.edge.openai.responses.logprobs import TextLogprobs
from coppice_scheduler.edge.openai.responses.request import ParsedResponse, parse_response
from coppice_scheduler.edge.openai.responses.response import ResponseShape


class GenerateApi:
    def __init__(self, frontdoor: FrontDoor, generation: Generation) -> None:
        self._frontdoor = frontdoor
        self._generation = generation
        self._chat = Surface(CHAT, parse_chat, self._shape, "tools[].function.strict")
        self._completion = Surface(COMPLETION, parse_completion, self._shape)
        self._response = Surface(RESPONSES, parse_response, self._response_shape, prompt_field="input")

    async def completions(self, request: Request) -> Response:
        return await self._generation.answer(request, self._completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generation.answer(request, self._chat)

    async def responses(self, request: Request) -> Response:
        return await self._generation.answer(request, self._response)

    def _response_shape(self, call: Call, parsed: ParsedResponse) -> ResponseShape:
        has_logprobs = parsed.spec.num_logprobs is not None
        logprobs = TextLogprobs(self._frontdoor.token_texts) if has_logprobs else None
        return ResponseShape(call, self._frontdoor.model.id, int(time.time()), parsed.told_again, logprobs)

    def _shape(self, call: Call, parsed: ParsedRequest) -> Shape:
        return Shape(
            call=call,
            model=self._frontdoor.model.id,
            created=int(time.time()),
            is_chat=parsed.spec.is_chat,
            presentation=parsed.presentation,
            texts=self._frontdoor.token_texts,
            has_logprobs=parsed.spec.num_logprobs is not None,
            num_prompt_logprobs=parsed.spec.num_prompt_logprobs,
        )
