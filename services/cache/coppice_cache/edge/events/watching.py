"""`Watch`: following the trees over gRPC, one thread of the server for each watcher.

A watcher that does not read holds nothing but its thread: messages are made one by one as it takes them, and what it
leaves lying is the hub's ring, which goes on without it. When one message was not taken for `stall_s`, its call ends
with CANCELLED; the client comes back with its position and goes on there, or starts over with a snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored
from coppice_cache.edge.events.following import (
    STILL_S,
    Began,
    Changes,
    Ended,
    Part,
    SnapshotSource,
    Step,
    Still,
    follow,
)
from coppice_cache.edge.service.event_hub import EventHub, HubClosed, Position
from coppice_cache.edge.service.locked_core import CoreBroken
from coppice_rpc.v1 import cache_admin_pb2 as pb

_log = logging.getLogger("coppice.cache")
WATCHERS_MAX = 16
STALL_S = 30.0


class _Watcher:
    """One call: since when it waits for its client to take a message."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.sending_since_s: float | None = None


class Watchers:
    """All calls of `Watch`, and a thread that ends those which do not read."""

    def __init__(
        self,
        hub: EventHub,
        source: SnapshotSource,
        *,
        watchers_max: int = WATCHERS_MAX,
        stall_s: float = STALL_S,
        still_s: float = STILL_S,
    ) -> None:
        self._hub = hub
        self._source = source
        self._watchers_max = watchers_max
        self._stall_s = stall_s
        self._still_s = still_s
        self._lock = threading.Lock()
        self._watchers: set[_Watcher] = set()
        self._stopping = threading.Event()
        self._guard = threading.Thread(target=self._end_stalled, name="watch guard", daemon=True)

    @property
    def num_watchers(self) -> int:
        with self._lock:
            return len(self._watchers)

    def start(self) -> None:
        self._guard.start()

    def stop(self) -> None:
        """The calls end by themselves when the hub is closed."""
        self._stopping.set()
        if self._guard.is_alive():
            self._guard.join(timeout=5)

    def serve(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """Body of the rpc. Aborts with RESOURCE_EXHAUSTED, or with UNAVAILABLE when the service stops."""
        watcher = _Watcher(context)
        with self._lock:
            is_full = len(self._watchers) >= self._watchers_max
            if not is_full:
                self._watchers.add(watcher)
        if is_full:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._watchers_max} watchers are here already, which is the limit; end one of them first",
            )
        try:
            yield from self._messages(request, watcher)
        except (HubClosed, CoreBroken):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the service is stopping; come back with the last position")
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def _messages(self, request: pb.WatchRequest, watcher: _Watcher) -> Iterator[pb.WatchResponse]:
        # Sequence 0 is where a client stands that saw a part of a snapshot.
        can_resume = request.resume_stream and request.resume_sequence
        resume = Position(request.resume_stream, request.resume_sequence) if can_resume else None
        subscription = self._hub.subscribe()
        watcher.context.add_callback(subscription.wake)
        try:
            for step in follow(self._hub, self._source, subscription, resume, self._still_s):
                if not watcher.context.is_active():
                    return
                for message in step_to_wire(step, with_tokens=request.with_tokens):
                    watcher.sending_since_s = time.monotonic()
                    yield message
                    watcher.sending_since_s = None
        finally:
            subscription.close()

    def _end_stalled(self) -> None:
        while not self._stopping.wait(min(1.0, self._stall_s)):
            now_s = time.monotonic()
            with self._lock:
                watchers = list(self._watchers)
            for watcher in watchers:
                since_s = watcher.sending_since_s
                if since_s is not None and now_s - since_s > self._stall_s:
                    _log.warning("%s does not read what it watches; its call is ended", watcher.context.peer())
                    watcher.context.cancel()


def step_to_wire(step: Step, *, with_tokens: bool) -> Iterator[pb.WatchResponse]:
    """The messages of one step. Inside of a snapshot the sequence is 0: nobody can resume from there."""
    match step:
        case Began(stream):
            yield pb.WatchResponse(stream=stream, snapshot_begin=pb.SnapshotBegin())
        case Part(stream, events):
            for stored in events:
                yield _event_to_wire(stream, 0, stored, with_tokens)
        case Ended(position, num_blocks):
            yield pb.WatchResponse(
                stream=position.stream,
                sequence=position.sequence,
                snapshot_end=pb.SnapshotEnd(num_blocks=num_blocks),
            )
        case Changes(position, events):
            for sequence, event in enumerate(events, start=step.first_sequence):
                yield _event_to_wire(position.stream, sequence, event, with_tokens)
        case Still(position):
            yield pb.WatchResponse(stream=position.stream, sequence=position.sequence)


def _event_to_wire(stream: int, sequence: int, event: IndexEvent, with_tokens: bool) -> pb.WatchResponse:
    message = pb.WatchResponse(stream=stream, sequence=sequence)
    match event:
        case Stored():
            message.stored.worker_id = event.worker_id
            message.stored.worker_epoch = event.worker_epoch
            message.stored.domain = event.domain
            message.stored.namespace = event.namespace
            message.stored.parent_seal = event.parent_seal
            message.stored.handles = event.handles
            message.stored.seals = event.seals
            message.stored.tier = event.tier
            if with_tokens:
                message.stored.tokens = event.tokens
        case Removed():
            message.removed.worker_id = event.worker_id
            message.removed.worker_epoch = event.worker_epoch
            message.removed.domain = event.domain
            message.removed.namespace = event.namespace
            message.removed.handles = event.handles
            message.removed.seals = event.seals
            message.removed.tier = event.tier
            message.removed.all_below = event.all_below
        case Cleared():
            message.cleared.worker_id = event.worker_id
            message.cleared.worker_epoch = event.worker_epoch
            message.cleared.domain = event.domain
            message.cleared.namespace = event.namespace
    return message
