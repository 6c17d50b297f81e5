"""Generation over REST: whole answers, and streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response
from opentelemetry.context import Context

from coppice.telemetry.trace_context import context_from_headers
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import ApiError, internal
from coppice_scheduler.edge.base.request_id import RequestId
from coppice_scheduler.edge.frontend.body_budget import Body
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.http.rate_headers import rate_headers
from coppice_scheduler.edge.http.request_ids import id_of
from coppice_scheduler.edge.http.requests import caller_of, read_body
from coppice_scheduler.edge.http.sse import CLIENT_CLOSED_STATUS, COMMENT, DONE, EventStream, event, unless_disconnected
from coppice_scheduler.edge.openai.bodies import Answer, Shape
from coppice_scheduler.edge.openai.parsing.fields import (
    NAMED_MAX,
    NO_EFFECT,
    Reading,
    UnknownFields,
    ignored_header,
)
from coppice_scheduler.edge.openai.parsing.schema import ParsedRequest, parse_chat, parse_completion
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Delta

log = logging.getLogger("coppice.scheduler.http")
WARNINGS_MAX = 256  # of unknown fields, in the life of a front door
FIRST_BYTE_S = 0.5  # after it was taken, a stream that has nothing to tell begins with a comment


class GenerateApi:
    def __init__(self, frontdoor: FrontDoor, body_timeout_s: float, first_byte_s: float, reading: Reading) -> None:
        self._frontdoor = frontdoor
        self._body_timeout_s = body_timeout_s
        self._first_byte_s = first_byte_s
        self._reading = reading
        self._warned_of: set[str] = set()

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, parse_chat)

    async def _generate(self, request: Request, parse: Callable[[bytes, Reading], ParsedRequest]) -> Response:
        tenant = caller_of(self._frontdoor, request)
        parent = context_from_headers(request.headers)
        with self._frontdoor.bodies.body(tenant.id) as body:
            await read_body(request, self._body_timeout_s, body, self._frontdoor.loop_share)
            answer = await unless_disconnected(
                request.receive, lambda: self._answer(tenant, body, parse, parent, id_of(request))
            )
        return answer if answer is not None else Response(status_code=CLIENT_CLOSED_STATUS)

    async def _answer(
        self,
        tenant: Tenant,
        body: Body,
        parse: Callable[[bytes, Reading], ParsedRequest],
        parent: Context,
        request_id: RequestId,
    ) -> Response:
        shape, headers = await self._opened(tenant, body, parse, parent, request_id)
        body.release()  # nothing of it is kept from now on
        if shape.presentation.stream:
            return await _streamed(shape, headers, self._first_byte_s)
        return await _whole(shape, headers)

    async def _opened(
        self,
        tenant: Tenant,
        body: Body,
        parse: Callable[[bytes, Reading], ParsedRequest],
        parent: Context,
        request_id: RequestId,
    ) -> tuple[Shape, dict[str, str]]:
        """An admitted call and how its answer looks, and headers of that."""
        parsed = await self._frontdoor.read(tenant, body.take_bytes(), lambda raw: parse(raw, self._reading))
        self._warn_of(parsed.ignored)
        call = await self._frontdoor.open(tenant, parsed.spec, parent, request_id)
        shape = Shape(
            call=call,
            model=self._frontdoor.model.id,
            created=int(time.time()),
            is_chat=parsed.spec.is_chat,
            presentation=parsed.presentation,
            texts=self._frontdoor.token_texts,
            has_logprobs=parsed.spec.num_logprobs is not None,
        )
        ignored = parsed.ignored
        if parsed.spec.tool_use is not None:
            ignored += self._frontdoor.syntax.tools.without_effect(parsed.spec.tool_use)
        return shape, {**ignored_header(ignored), **rate_headers(self._frontdoor.limits_left(tenant))}

    def _warn_of(self, ignored: tuple[str, ...]) -> None:
        if self._reading.unknown_fields is UnknownFields.WARN:
            for name in ignored[:NAMED_MAX]:
                # So many and no more: what clients write must not fill the log.
                if name not in NO_EFFECT and name not in self._warned_of and len(self._warned_of) < WARNINGS_MAX:
                    self._warned_of.add(name)
                    log.warning("the field %r, which clients send, has no effect here", name)


async def _whole(shape: Shape, headers: dict[str, str]) -> Response:
    answers = [Answer() for _ in range(shape.num_answers)]
    async with aclosing(shape.call.deltas()) as deltas:
        async for delta in deltas:
            answers[delta.index].add(delta)
    body = json.dumps(shape.whole(answers), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, media_type="application/json", headers=headers)


async def _streamed(shape: Shape, headers: dict[str, str], first_byte_s: float) -> Response:
    events = _events(shape, first_byte_s)
    try:
        opening = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(opening, events, headers)


async def _events(shape: Shape, first_byte_s: float) -> AsyncGenerator[bytes, None]:
    """What a stream opens with, which may be nothing, then its events.

    In place of the first item a refusal is raised, and a failure that comes soon: they get a status of their own. Later
    ones are events.
    """
    async with aclosing(shape.call.deltas()) as deltas:
        first, taken = asyncio.ensure_future(anext(deltas)), asyncio.create_task(shape.call.taken())
        try:
            await asyncio.wait((first, taken), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((first,), timeout=first_byte_s)
            if first.done():
                first.result()
            yield b"" if first.done() else COMMENT
            async with aclosing(_chunks(first, deltas, shape)) as chunks:
                async for data in chunks:
                    yield data
        finally:
            for task in (first, taken):
                task.cancel()
            await asyncio.gather(first, taken, return_exceptions=True)


async def _chunks(
    first: asyncio.Future[Delta], deltas: AsyncGenerator[Delta, None], shape: Shape
) -> AsyncGenerator[bytes, None]:
    usage = NO_USAGE
    seen: set[int] = set()
    try:
        delta: Delta | None = await first
        if shape.is_chat:
            for index in range(shape.num_answers):
                yield event(shape.role_chunk(index))
        while delta is not None:
            usage += delta.ending.usage if delta.ending is not None else NO_USAGE
            shows = delta.text or delta.reasoning or delta.calls or delta.logprobs or delta.ending is not None
            if shows or shape.presentation.return_token_ids:
                yield event(shape.delta_chunk(delta, is_first=delta.index not in seen))
                seen.add(delta.index)
            delta = await anext(deltas, None)
    except ApiError as error:
        yield event(error.body())
        return
    except Exception:
        log.exception("a stream failed")
        yield event(internal().body())
        return
    if shape.presentation.include_usage:
        yield event(shape.usage_chunk(usage))
    yield DONE
