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

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId
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
from coppice_cache.edge.events.token_rule import TokenRule
from coppice_cache.edge.service.event_hub import EventHub, HubClosed, Position
from coppice_cache.edge.service.locked_core import CoreBroken
from coppice_rpc.v1 import cache_admin_pb2 as pb

_log = logging.getLogger("coppice.cache")
WATCHERS_MAX = 16
STALL_S = 30.0


class _Watcher:
    """One call: whose tokens it gives, and since when it waits for its client to take a message."""

    def __init__(self, context: Any, token_domains: frozenset[DomainId]) -> None:
        self.context = context
        self.token_domains = token_domains
        self.sending_since_s: float | None = None


class Watchers:
    """All calls of `Watch`, and a thread that ends those which do not read."""

    def __init__(
        self,
        hub: EventHub,
        source: SnapshotSource,
        rule: TokenRule,
        *,
        watchers_max: int = WATCHERS_MAX,
        stall_s: float = STALL_S,
        still_s: float = STILL_S,
    ) -> None:
        self._hub = hub
        self._source = source
        self._rule = rule
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

    def set_rule(self, rule: TokenRule) -> None:
        """From now on; calls that give what it forbids end, and are told why when they come again."""
        with self._lock:
            self._rule = rule
            forbidden = [w for w in self._watchers if w.token_domains and rule.why_not(w.token_domains) is not None]
        for watcher in forbidden:
            watcher.context.cancel()

    def serve(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """Body of the rpc. Aborts with RESOURCE_EXHAUSTED, with UNAVAILABLE when the service stops, and for tokens that
        the caller may not have."""
        token_domains = frozenset(map(DomainId, request.domains if request.with_tokens else ()))
        if request.with_tokens and not token_domains:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "with_tokens needs domains: name those that you follow")
        watcher = _Watcher(context, token_domains)
        with self._lock:
            problem = self._rule.why_not(token_domains) if token_domains else None
            is_full = len(self._watchers) >= self._watchers_max
            if not is_full and problem is None:
                self._watchers.add(watcher)
        if problem is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
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
        form = _Form(frozenset(map(DomainId, request.domains)), with_tokens=request.with_tokens)
        subscription = self._hub.subscribe()
        watcher.context.add_callback(subscription.wake)
        try:
            for step in follow(self._hub, self._source, subscription, resume, self._still_s):
                if not watcher.context.is_active():
                    return
                for message in form.messages(step):
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


class _Form:
    """The messages of one watcher: of `domains` alone, where it names any, and of what is gone in all of them."""

    def __init__(self, domains: frozenset[DomainId], *, with_tokens: bool) -> None:
        self._domains = domains
        self._with_tokens = with_tokens
        self._num_blocks = 0  # of the snapshot so far

    def messages(self, step: Step) -> Iterator[pb.WatchResponse]:
        """Inside of a snapshot the sequence is 0: nobody can resume from there."""
        match step:
            case Began(stream):
                self._num_blocks = 0
                yield pb.WatchResponse(stream=stream, snapshot_begin=pb.SnapshotBegin())
            case Part(stream, events):
                for stored in filter(self._concerns, events):
                    self._num_blocks += len(stored.handles) // HANDLE_BYTES
                    yield _event_to_wire(stream, 0, stored, self._with_tokens)
            case Ended(position):
                end = pb.SnapshotEnd(num_blocks=self._num_blocks)
                yield pb.WatchResponse(stream=position.stream, sequence=position.sequence, snapshot_end=end)
            case Changes(position, events):
                for sequence, event in enumerate(events, start=step.first_sequence):
                    if self._concerns(event):
                        yield _event_to_wire(position.stream, sequence, event, self._with_tokens)
                if not self._concerns(events[-1]):
                    yield _position_to_wire(position)  # where to resume, though nothing of it was said
            case Still(position):
                yield _position_to_wire(position)

    def _concerns(self, event: IndexEvent) -> bool:
        return not self._domains or not event.domain or event.domain in self._domains


def _position_to_wire(position: Position) -> pb.WatchResponse:
    return pb.WatchResponse(stream=position.stream, sequence=position.sequence)


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
