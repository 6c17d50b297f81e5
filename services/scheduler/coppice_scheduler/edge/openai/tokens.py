"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from coppice.settings import nearest
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt, Prompt, TextPrompt
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.http.requests import bearer_of, read_body
from coppice_scheduler.edge.openai.messages import messages_of
from coppice_scheduler.edge.openai.schema import packed_ids

_TOKENIZE = ("model", "prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt")
_DETOKENIZE = ("model", "tokens")


class TokensApi:
    def __init__(self, frontdoor: FrontDoor, body_timeout_s: float) -> None:
        self._frontdoor = frontdoor
        self._body_timeout_s = body_timeout_s

    async def tokenize(self, request: Request) -> Response:
        fields = await self._fields(request, _TOKENIZE)
        prompt, name = _prompt(fields)
        adds, shows_names = fields.flag("add_special_tokens", default=True), fields.flag("return_token_strs")
        fields.assert_read(_TOKENIZE)
        tokens = await self._frontdoor.tokenize(prompt, name, add_special_tokens=adds)
        names = None
        if shows_names:
            names = await asyncio.to_thread(lambda: list(map(self._frontdoor.token_texts.name_of, tokens)))
        body: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._frontdoor.model.max_context,
            "tokens": tokens,
            "token_strs": names,
        }
        return JSONResponse(body)

    async def detokenize(self, request: Request) -> Response:
        fields = await self._fields(request, _DETOKENIZE)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise fields.wrong("tokens", "a list of token ids")
        fields.assert_read(_DETOKENIZE)
        return JSONResponse({"prompt": await self._frontdoor.detokenize(packed_ids(tokens, "tokens"), "tokens")})

    async def _fields(self, request: Request, known: tuple[str, ...]) -> Fields:
        self._frontdoor.tenant_of(bearer_of(request))
        body = parse_object(await read_body(request, self._body_timeout_s))
        for name in body:
            if name not in known:
                raise invalid(
                    f"Unknown field {name[:100]!r}; {nearest(name[:100], known)}",
                    param=name[:100],
                    code="unknown_parameter",
                )
        fields = Fields(body)
        model = fields.text("model")
        if model is not None:
            self._frontdoor.check_model(model)
        return fields


def _prompt(fields: Fields) -> tuple[Prompt, str]:
    """What to tokenise, and the field that it came in."""
    text, has_messages = fields.text("prompt"), fields.get("messages") is not None
    is_open, adds_tokens = fields.flag("add_generation_prompt", default=True), fields.flag("add_special_tokens")
    if (text is not None) == has_messages:
        raise invalid("Send either prompt or messages.", param="prompt", code="missing" if text is None else None)
    if text is not None:
        return TextPrompt(text), "prompt"
    if not is_open:
        raise invalid(
            "add_generation_prompt: false is not supported; leave it out.",
            param="add_generation_prompt",
            code="unsupported_parameter",
        )
    if adds_tokens:
        raise invalid(
            "A chat has the special tokens of its template; leave add_special_tokens out.",
            param="add_special_tokens",
            code="unsupported_parameter",
        )
    return ChatPrompt(messages_of(fields)), "messages"
