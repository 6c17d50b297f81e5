"""A generation over REST, in whatever API's shape: read, opened, then told whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from opentelemetry.context import Context

from coppice.telemetry.trace_context import context_from_headers
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import CLIENT_CLOSED_STATUS, ApiError, internal
from coppice_scheduler.edge.base.request_id import RequestId
from coppice_scheduler.edge.frontend.body_budget import Body
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
from coppice_scheduler.edge.http.field_table import NAMED_MAX, FieldTable, Reading, UnknownFields, ignored_header
from coppice_scheduler.edge.http.idempotency import IDEMPOTENCY_KEY, CallKey, answer_once, call_key_of
from coppice_scheduler.edge.http.long_lists import write_json
from coppice_scheduler.edge.http.request_ids import id_of
from coppice_scheduler.edge.http.requests import caller_of, read_body
from coppice_scheduler.edge.http.sse import KEEP_ALIVE, EventStream, unless_disconnected
from coppice_scheduler.edge.text.text_stream import Delta

log = logging.getLogger("coppice.scheduler.http")
WARNINGS_MAX = 256  # of unknown fields, in the life of a front door
_ENTRY_BYTES = 64  # of JSON, for a token with its log-probability
_SHORT_BYTES = 16 * 1024  # some 2 ms
FIRST_BYTE_S = 0.5  # after it was taken, a stream that has nothing to tell begins with empty lines


class Asked(Protocol):
    """What a body says."""

    @property
    def spec(self) -> GenerationSpec: ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that were taken without effect."""
        ...


class AnswerShape(Protocol):
    """How an API tells one call. Of `gather` and `whole` it uses both, or all of the others."""

    def gather(self, delta: Delta) -> None: ...

    def whole(self) -> Mapping[str, Any]: ...

    def opening(self) -> Iterable[bytes]:
        """Events before anything came."""
        ...

    def events_of(self, delta: Delta) -> Iterable[bytes]: ...

    def closing(self) -> Iterable[bytes]:
        """Events when all has come."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The event that nothing follows."""
        ...


A = TypeVar("A", bound=Asked)


@dataclass(frozen=True, slots=True)
class Surface(Generic[A]):
    """One route: what it makes of a body, and how it tells the answer."""

    fields: FieldTable
    parse: Callable[[bytes, Reading], A]
    shape: Callable[[Call, A], AnswerShape]
    strict_field: str = "tools[].strict"  # where a tool says so
    prompt_field: str = "messages"  # where the conversation stands


class Generation:
    """What all routes that generate do alike."""

    def __init__(self, frontdoor: FrontDoor, body_timeout_s: float, first_byte_s: float, reading: Reading) -> None:
        self._frontdoor = frontdoor
        self._body_timeout_s = body_timeout_s
        self._first_byte_s = first_byte_s
        self._reading = reading
        self._warned_of: set[str] = set()

    async def answer(self, request: Request, surface: Surface[A]) -> Response:
        tenant = caller_of(self._frontdoor, request)
        parent = context_from_headers(request.headers)
        with self._frontdoor.bodies.body(tenant) as body:
            await read_body(request, self._body_timeout_s, body, self._frontdoor.loop_share)
            answer = await unless_disconnected(
                request.receive, lambda: self._answer(tenant, body, surface, parent, request)
            )
        return answer if answer is not None else Response(status_code=CLIENT_CLOSED_STATUS)

    async def _answer(
        self,
        tenant: Tenant,
        body: Body,
        surface: Surface[A],
        parent: Context,
        request: Request,
    ) -> Response:
        sent, path = request.headers.get(IDEMPOTENCY_KEY), request.url.path
        reading = replace(self._reading, context=self._frontdoor.context_of(tenant))

        def parse(raw: bytes) -> tuple[A, CallKey | None]:
            return surface.parse(raw, reading), call_key_of(sent, path, raw)

        with _named(surface):
            asked, key = await self._frontdoor.read(tenant, body.take_bytes(), parse)
        self._warn_of(asked.ignored, surface.fields)
        is_kept = key is not None and not asked.spec.streams
        if is_kept:
            self._frontdoor.check_model(tenant, asked.spec.model)  # before an answer of an earlier call is told
        unkept = (IDEMPOTENCY_KEY,) if key is not None and not is_kept else ()
        computed = self._computed(tenant, body, surface, parent, id_of(request), asked, unkept)
        del asked  # what the client sent is not kept while the call runs
        if key is None or not is_kept:
            return await computed
        return await answer_once(self._frontdoor, tenant, key, computed)

    async def _computed(
        self,
        tenant: Tenant,
        body: Body,
        surface: Surface[A],
        parent: Context,
        request_id: RequestId,
        asked: A,
        unkept: tuple[str, ...],
    ) -> Response:
        with _named(surface):
            call = await self._frontdoor.open(tenant, asked.spec, parent, request_id)
        shape, headers, streams = (
            surface.shape(call, asked),
            self._headers(asked, surface.strict_field, unkept),
            asked.spec.streams,
        )
        num_output_tokens = sum(prompt.max_new_tokens for prompt in call.prompts)
        size = _ENTRY_BYTES * asked.spec.num_told(call.num_prompt_tokens, num_output_tokens)
        body.release()  # nothing of it is kept from now on
        del asked
        if streams:
            return await _streamed(call, shape, headers, self._first_byte_s)
        await _gather(call, shape)
        if size <= _SHORT_BYTES:
            return _json(_dumped(shape), headers)
        # Log-probabilities may be many: they are written beside the loop.
        return _json(await self._frontdoor.text_work.run(tenant.id, size, lambda: write_json(shape.whole())), headers)

    def _headers(self, asked: Asked, strict_field: str, unkept: tuple[str, ...]) -> dict[str, str]:
        """`unkept`: headers of the request that were taken without effect."""
        ignored, use = unkept + asked.ignored, asked.spec.tool_use
        if use is not None and self._frontdoor.syntax.tools.ignores_strict(use):
            ignored += (strict_field,)
        return ignored_header(ignored)

    def _warn_of(self, ignored: tuple[str, ...], fields: FieldTable) -> None:
        if self._reading.unknown_fields is UnknownFields.WARN:
            for name in ignored[:NAMED_MAX]:
                # So many and no more: what clients write must not fill the log.
                is_known = name in fields.no_effect or name in self._warned_of
                if not is_known and len(self._warned_of) < WARNINGS_MAX:
                    self._warned_of.add(name)
                    log.warning("the field %r, which clients send, has no effect here", name)


@contextlib.contextmanager
def _named(surface: Surface[Any]) -> Iterator[None]:
    """Errors name the field where this API has the conversation."""
    try:
        yield
    except ApiError as error:
        if error.param == "messages":
            error.param = surface.prompt_field
        raise


async def _gather(call: Call, shape: AnswerShape) -> None:
    async with aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            shape.gather(delta)


def _dumped(shape: AnswerShape) -> bytes:
    return json.dumps(shape.whole(), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _json(body: bytes, headers: dict[str, str]) -> Response:
    return Response(body, media_type="application/json", headers=headers)


async def _streamed(call: Call, shape: AnswerShape, headers: dict[str, str], first_byte_s: float) -> Response:
    events = _events(call, shape, first_byte_s)
    try:
        opening = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(opening, events, headers)


async def _events(call: Call, shape: AnswerShape, first_byte_s: float) -> AsyncGenerator[bytes, None]:
    """What a stream opens with, which may be nothing, then its events.

    In place of the first item a refusal is raised, and a failure that comes soon: they get a status of their own. Later
    ones are events.
    """
    async with aclosing(call.deltas()) as deltas:
        first, taken = asyncio.ensure_future(anext(deltas)), asyncio.create_task(call.taken())
        try:
            await asyncio.wait((first, taken), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((first,), timeout=first_byte_s)
            if first.done():
                first.result()
            yield b"" if first.done() else KEEP_ALIVE
            async with aclosing(_told(first, deltas, shape)) as told:
                async for event in told:
                    yield event
        finally:
            for task in (first, taken):
                task.cancel()
            await asyncio.gather(first, taken, return_exceptions=True)


async def _told(
    first: asyncio.Future[Delta], deltas: AsyncGenerator[Delta, None], shape: AnswerShape
) -> AsyncGenerator[bytes, None]:
    try:
        delta: Delta | None = await first
        for event in shape.opening():
            yield event
        while delta is not None:
            for event in shape.events_of(delta):
                yield event
            delta = await anext(deltas, None)
    except ApiError as error:
        yield shape.failure(error)
        return
    except Exception:
        log.exception("a stream failed")
        yield shape.failure(internal())
        return
    for event in shape.closing():
        yield event
