"""What one party may take of a gRPC server with threads.

    headers --> thread --> role (grpc_tls) --> message --> method --> answers
                                                  |   calls of a party   |
                                                  +-- waits for callers -+

gRPC for Python gives a call its thread when its headers are there, and reads the message of a unary call on it, before
anything of ours runs. So every method takes its message as the first of a stream here, as the bytes are the same: the
role is looked at before, and a thread that waits for its caller is one of few (`CallerWaits`), whether it waits for a
message to come or to be taken. Health has threads of its own. All methods of a server are bounded, as it gets them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from coppice.edge.grpc_calls.waits import CallerWaits, WaitEnded
from coppice.edge.grpc_tls import party_of

_HEALTH = "/grpc.health.v1.Health/"

Behaviour = Callable[..., Any]
Deserializer = Callable[[bytes], Any] | None


@dataclass(frozen=True, slots=True)
class Bounds:
    threads: int
    waits: int  # for callers, of all parties
    party_calls: int  # of one party, whose methods run and wait for no caller


class CallThreads:
    """One pool of threads, and what calls may take of it."""

    def __init__(self, bounds: Bounds, name: str) -> None:
        self.pool = ThreadPoolExecutor(bounds.threads, thread_name_prefix=name)
        self.waits = CallerWaits(bounds.waits)
        self._party_calls_max = bounds.party_calls
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()  # whose method runs, of each party that has any

    @contextmanager
    def call(self, context: Any, deserialize: Deserializer) -> Iterator[Call]:
        """For as long as the call has its thread. Aborts with CANCELLED where that was needed."""
        try:
            yield Call(self, party_of(context), context, deserialize)
        except WaitEnded:
            context.abort(grpc.StatusCode.CANCELLED, "this call kept a thread waiting that others needed")

    def begin(self, party: str) -> bool:
        """A method of the party runs from now on; False if it may not."""
        with self._lock:
            may = self._calls[party] < self._party_calls_max
            self._calls[party] += may
            return may

    def end(self, party: str) -> None:
        with self._lock:
            self._calls[party] -= 1
            if not self._calls[party]:
                del self._calls[party]

    def resume(self, party: str) -> None:
        """A method that ran before runs again."""
        with self._lock:
            self._calls[party] += 1


class Call:
    """What a call hears from its caller and tells it, each a wait of its party; and what it does between, which is one
    of its party's calls."""

    def __init__(self, threads: CallThreads, party: str, context: Any, deserialize: Deserializer) -> None:
        self._threads = threads
        self._party = party
        self._context = context
        self._deserialize = deserialize

    @contextmanager
    def in_method(self) -> Iterator[None]:
        """Aborts with RESOURCE_EXHAUSTED."""
        if not self._threads.begin(self._party):
            words = f"{self._party} has as many calls here already as it may have at once"
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        try:
            yield
        finally:
            self._threads.end(self._party)

    def message(self, received: Iterator[bytes]) -> Any:
        """The only message of a unary call, before its method runs."""
        with self._waiting():
            data = next(received, None)
        if data is None:
            self._context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method takes exactly one message")
        return self._read(data)

    def messages(self, received: Iterator[bytes]) -> Iterator[Any]:
        while True:
            with self._paused(), self._waiting():
                data = next(received, None)
            if data is None:
                return
            yield self._read(data)

    def answers(self, made: Iterator[Any]) -> Iterator[Any]:
        for answer in made:
            with self._paused(), self._waiting():
                yield answer

    def _waiting(self) -> AbstractContextManager[None]:
        return self._threads.waits.waiting(self._party, self._context.cancel)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._threads.end(self._party)
        try:
            yield
        finally:
            self._threads.resume(self._party)

    def _read(self, data: bytes | None) -> Any:
        if self._deserialize is None:
            return data
        try:
            return self._deserialize(data or b"")
        except Exception:
            self._context.abort(grpc.StatusCode.INTERNAL, "the message cannot be read as one of this method")


class CallBounds(grpc.ServerInterceptor):
    """Innermost of a server's interceptors: those before it run before the message is there. `others` has the server's
    own pool."""

    def __init__(self, others: CallThreads, health: CallThreads) -> None:
        self._others = others
        self._health = health

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        is_health = handler_call_details.method.startswith(_HEALTH)
        return _bounded(handler, self._health if is_health else self._others)


def _bounded(handler: Any, threads: CallThreads) -> Any:
    """The same method, as one that takes a stream."""
    kinds = handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream
    behaviour = next(kind for kind in kinds if kind is not None)
    hears = Call.messages if handler.request_streaming else Call.message
    make = grpc.stream_unary_rpc_method_handler
    answer = _whole
    if handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler
        answer = _told if getattr(behaviour, "experimental_non_blocking", False) else _streamed
    answering = answer(behaviour, hears, threads, handler.request_deserializer)
    answering.experimental_thread_pool = threads.pool  # type: ignore[attr-defined]
    return make(answering, None, handler.response_serializer)


def _whole(behaviour: Behaviour, hears: Behaviour, threads: CallThreads, deserialize: Deserializer) -> Behaviour:
    def answered(received: Iterator[bytes], context: Any) -> Any:
        with threads.call(context, deserialize) as call:
            said = hears(call, received)
            with call.in_method():
                return behaviour(said, context)

    return answered


def _streamed(behaviour: Behaviour, hears: Behaviour, threads: CallThreads, deserialize: Deserializer) -> Behaviour:
    def answered(received: Iterator[bytes], context: Any) -> Iterator[Any]:
        with threads.call(context, deserialize) as call:
            said = hears(call, received)
            with call.in_method():
                yield from call.answers(behaviour(said, context))

    return answered


def _told(behaviour: Behaviour, hears: Behaviour, threads: CallThreads, deserialize: Deserializer) -> Behaviour:
    """A method that leaves its thread at once and is told its answers later, on other threads."""

    def answered(received: Iterator[bytes], context: Any, send: Callable[[Any], None]) -> None:
        with threads.call(context, deserialize) as call:
            behaviour(hears(call, received), context, send)

    answered.experimental_non_blocking = True  # type: ignore[attr-defined]
    return answered
