"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import ChatPrompt, Prompt, TextPrompt
from coppice_scheduler.edge.http.field_table import Notes, Reading, UnknownFields, unknown_field
from coppice_scheduler.edge.http.json_body import Fields, parse_object
from coppice_scheduler.edge.http.requests import answer_to_body
from coppice_scheduler.edge.openai.parsing.messages import messages_of
from coppice_scheduler.edge.openai.parsing.schema import packed_ids
from coppice_scheduler.edge.openai.parsing.template_values import PROMPT_END, kwargs_of, prompt_end_of
from coppice_scheduler.edge.openai.parsing.tools import tools_of
from coppice_scheduler.edge.text.chat import PromptEnd
from coppice_scheduler.edge.text.tokenizer import SLICE, TOKEN_DTYPE, unpack_tokens

_TOKENIZE = (
    *("model", "prompt", "messages", "chat_template_kwargs", "tools"),
    *("add_special_tokens", "return_token_strs", "add_generation_prompt", "continue_final_message"),
)
_DETOKENIZE = ("model", "tokens")


@dataclass(frozen=True, slots=True)
class _TokenizeAsked:
    prompt: Prompt
    field: str  # that it came in
    adds: bool  # special tokens
    shows_names: bool


class TokensApi:
    def __init__(self, frontdoor: FrontDoor, body_timeout_s: float, reading: Reading) -> None:
        self._frontdoor = frontdoor
        self._body_timeout_s = body_timeout_s
        self._reading = replace(reading, unknown_fields=UnknownFields.REFUSE)  # an answer has no header that lists them

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._detokenized)

    async def _answer(self, request: Request, answer: Callable[[Tenant, bytes], Awaitable[bytes]]) -> Response:
        async def respond(tenant: Tenant, raw: bytes) -> Response:
            return Response(await answer(tenant, raw), media_type="application/json")

        return await answer_to_body(self._frontdoor, request, self._body_timeout_s, respond)

    async def _tokenized(self, tenant: Tenant, raw: bytes) -> bytes:
        asked = await self._frontdoor.read(tenant, raw, lambda raw: self._tokenize_asked(tenant, raw))
        tokens = await self._frontdoor.tokenize(tenant, asked.prompt, asked.field, add_special_tokens=asked.adds)
        return await self._frontdoor.text_work.run(
            tenant.id, len(tokens), lambda: self._tokens_body(tenant, tokens, asked.shows_names)
        )

    def _tokenize_asked(self, tenant: Tenant, raw: bytes) -> _TokenizeAsked:
        fields = self._fields(tenant, raw, _TOKENIZE)
        prompt, name = _prompt(fields, self._reading)
        adds, shows_names = fields.flag("add_special_tokens", default=True), fields.flag("return_token_strs")
        fields.assert_read(_TOKENIZE)
        return _TokenizeAsked(prompt, name, adds, shows_names)

    def _tokens_body(self, tenant: Tenant, tokens: bytes, shows_names: bool) -> bytes:
        """The answer, written in slices: other threads get their turn between two of them."""
        step = SLICE * TOKEN_DTYPE.itemsize
        slices = [tokens[at : at + step] for at in range(0, len(tokens), step)]
        names = "null"
        if shows_names:
            names = _json_list([self._frontdoor.token_texts.name_of(i) for i in unpack_tokens(s)] for s in slices)
        count, max_context = len(tokens) // TOKEN_DTYPE.itemsize, self._frontdoor.context_of(tenant).num_tokens
        ids = _json_list(unpack_tokens(part) for part in slices)
        body = f'{{"count":{count},"max_model_len":{max_context},"tokens":{ids},"token_strs":{names}}}'
        return body.encode("utf-8", "replace")

    async def _detokenized(self, tenant: Tenant, raw: bytes) -> bytes:
        tokens = await self._frontdoor.read(tenant, raw, lambda raw: self._detokenize_asked(tenant, raw))
        text = await self._frontdoor.detokenize(tenant, tokens, "tokens")
        return json.dumps({"prompt": text}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    def _detokenize_asked(self, tenant: Tenant, raw: bytes) -> bytes:
        fields = self._fields(tenant, raw, _DETOKENIZE)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise fields.wrong("tokens", "a list of token ids")
        fields.assert_read(_DETOKENIZE)
        return packed_ids(tokens, "tokens")

    def _fields(self, tenant: Tenant, raw: bytes, known: tuple[str, ...]) -> Fields:
        body = parse_object(raw)
        for name in body:
            if name not in known:
                raise unknown_field(name, known)
        fields = Fields(body)
        self._frontdoor.check_model(tenant, fields.text("model"))
        return fields


def _json_list(slices: Iterable[list[Any]]) -> str:
    """One list of the entries of all slices."""
    return f"[{','.join(json.dumps(part, ensure_ascii=False, separators=(',', ':'))[1:-1] for part in slices)}]"


def _prompt(fields: Fields, reading: Reading) -> tuple[Prompt, str]:
    """What to tokenise, and the field that it came in."""
    text, has_messages = fields.text("prompt"), fields.get("messages") is not None
    end, adds_tokens = prompt_end_of(fields), fields.flag("add_special_tokens")
    notes = Notes(reading.unknown_fields)
    values, tools = kwargs_of(fields, reading), tools_of(fields, notes)
    if (text is not None) == has_messages:
        raise invalid("Send either prompt or messages.", param="prompt", code="missing" if text is None else None)
    if text is not None:
        if values:
            raise invalid("chat_template_kwargs is only for messages.", param="chat_template_kwargs")
        if tools:
            raise invalid("tools are only for messages.", param="tools")
        if end is not PromptEnd.ANSWER:
            raise invalid(f"{PROMPT_END[end]} is only for messages.", param=PROMPT_END[end])
        return TextPrompt(text), "prompt"
    if adds_tokens:
        raise invalid(
            "A chat has the special tokens of its template; leave add_special_tokens out.",
            param="add_special_tokens",
            code="unsupported_parameter",
        )
    return ChatPrompt(messages_of(fields, notes), values, tools, end), "messages"
