"""Calls that need no key, health and reflection: none stays for ever, whatever it waits for.

    headers --> message --> method --> answers
    <-------------- time limit ------------->

A connection without calls ends when it was idle, an old one with its last call. Calls with a key have deadlines of
their own; without this, a stranger's would keep a connection for as long as they like. A caller that takes no answers
is out of reach here, as the end of a call comes behind them: so the calls that have several are few.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

Handler = Any  # of either of gRPC's kinds
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class KeylessLimits:
    call_s: float = 300.0
    streams: int = 256  # calls at once that may have several answers


class KeylessCalls(grpc.aio.ServerInterceptor):
    """Of all services but `with_keys`: calls end with DEADLINE_EXCEEDED, too many streams with RESOURCE_EXHAUSTED."""

    def __init__(self, with_keys: str, limits: KeylessLimits) -> None:
        self._with_keys = f"/{with_keys}/"
        self._limits = limits
        self._num_streams = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler]], handler_call_details: Any
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._with_keys):
            return handler
        return self._limited(handler)

    def _limited(self, handler: Handler) -> Handler:
        """The same method, as one that takes a stream: the library waits for the message of another before anything of
        ours runs."""

        async def answer(messages: AsyncIterator[Any], context: Context) -> None:
            if handler.response_streaming and self._num_streams >= self._limits.streams:
                words = f"{self._limits.streams} streams without a key are here already, which is the limit"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
            self._num_streams += handler.response_streaming
            try:
                async with asyncio.timeout(self._limits.call_s):
                    await _answer(handler, messages, context)
            except TimeoutError:
                words = f"a call without a key ends after {self._limits.call_s:g} s; call again"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, words)
            finally:
                self._num_streams -= handler.response_streaming

        make = grpc.stream_stream_rpc_method_handler
        return make(answer, handler.request_deserializer, handler.response_serializer)


async def _answer(handler: Handler, messages: AsyncIterator[Any], context: Context) -> None:
    said: Any = messages
    if not handler.request_streaming:
        said = await anext(messages, None)
        if said is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method takes exactly one message")
    if not handler.response_streaming:
        method = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await context.write(await method(said, context))
        return
    method = handler.stream_stream if handler.request_streaming else handler.unary_stream
    if inspect.iscoroutinefunction(method):
        await method(said, context)  # writes by itself
        return
    async for made in method(said, context):
        await context.write(made)
