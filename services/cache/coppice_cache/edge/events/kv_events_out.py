"""Tells the field's routers what is in the trees: a thread per way out, and the ways are in modules of their own.

    hub --> follow --> KvEventsView --> messages (topic, sequence, payload) --> ZmqOut or RedisOut

Sequences count per publisher, over all of its topics, as in vLLM. Whoever reads a publisher from its sequence 0 on has
what is in the trees. For those who come later a snapshot is said again in the middle of the stream before the first one
is forgotten, so what a publisher keeps always holds a whole one: whoever starts at the oldest message that is kept, and
ignores removals of blocks that it does not know, ends with the same blocks. Nothing is cleared for that, and readers
that were there before hear only of blocks that they have.

When changes were lost (the thread was slower than the hub is long, Redis was gone, another incarnation began) the
topics are cleared and a snapshot follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from coppice.edge.kv_events.payloads import encode_batch
from coppice.ids import TOKEN_BYTES
from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from coppice_cache.core.base.events import IndexEvent
from coppice_cache.edge.events.following import Began, Changes, Ended, Part, SnapshotSource, follow, slices
from coppice_cache.edge.events.kv_events_view import KvEventsView, Told
from coppice_cache.edge.service.event_hub import EventHub, HubClosed, Subscription
from coppice_cache.edge.service.locked_core import CoreBroken

_log = logging.getLogger("coppice.cache")
POLL_S = 0.1  # how long a replay request may wait while nothing happens
RETRY_S = 1.0
MESSAGE_BYTES = 64 << 10  # a message is closed when it has reached this; one event may exceed it
_HASH_WIRE_BYTES = 9
_TOKEN_WIRE_BYTES = 5
_EVENT_WIRE_BYTES = 150


class OutFailed(Exception):
    """The messages may have been lost, or some of them."""


class KvEventsWay(Protocol):
    """Where messages go. All calls come from one thread, but for `close`, which comes after it ended."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_messages(self) -> int:
        """At least so many of the last messages can be read again."""

    @property
    def keeps_bytes(self) -> int:
        """At least so many bytes of payload, if that is less."""

    def send(self, messages: list[tuple[str, bytes]]) -> None:
        """(topic, payload) each, in order. Raises OutFailed."""

    def serve(self) -> None:
        """Answer who asks, without waiting."""

    def close(self) -> None: ...


class _Kept:
    """How much was said since the last snapshot began, and how much that snapshot was."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.snapshot_messages = self.snapshot_bytes = 0

    def begin(self) -> None:
        self.messages = self.bytes = 0

    def end_snapshot(self) -> None:
        self.snapshot_messages, self.snapshot_bytes = self.messages, self.bytes

    def count(self, messages: list[tuple[str, bytes]]) -> None:
        self.messages += len(messages)
        self.bytes += sum(len(payload) for _, payload in messages)

    def is_due(self, way: KvEventsWay) -> bool:
        # Half of what is kept leaves room for the next snapshot. One that would fill more than that is said seldom
        # instead of always; who comes late starts with less than everything then.
        return self.messages > max(way.keeps_messages // 2, 4 * self.snapshot_messages) or self.bytes > max(
            way.keeps_bytes // 2, 4 * self.snapshot_bytes
        )


class KvEventsOut:
    """One publisher. `problem` says why it does not publish at the moment; empty when it does."""

    def __init__(self, view: KvEventsView, way: KvEventsWay, now_s: Callable[[], float] = time.time) -> None:
        self._view = view
        self.way = way
        self._now_s = now_s
        self._kept = _Kept()
        self._unsure: set[str] = set()  # topics of messages that may be lost
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""

    def start(self, hub: EventHub, source: SnapshotSource) -> None:
        self._thread = threading.Thread(target=self._run, args=(hub, source), name=self.way.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the hub was closed, which ends the thread. Closes the way."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            if self._thread.is_alive():  # the way belongs to its thread
                return
        self.way.close()

    def _run(self, hub: EventHub, source: SnapshotSource) -> None:
        subscription = hub.subscribe()
        try:
            while not self._stopping.is_set():
                try:
                    self._follow(hub, source, subscription)
                except OutFailed as failed:
                    if not self.problem:
                        _log.warning("%s: %s; it starts over with a snapshot", self.way.name, failed)
                    self.problem = f"{self.way.name}: {failed}"
                    self._stopping.wait(RETRY_S)
        except (HubClosed, CoreBroken):
            return
        except Exception:
            _log.exception("%s: the publisher broke; its readers hear nothing more", self.way.name)
            self.problem = f"{self.way.name}: the publisher broke"
        finally:
            subscription.close()

    def _follow(self, hub: EventHub, source: SnapshotSource, subscription: Subscription) -> None:
        for step in follow(hub, source, subscription, None, POLL_S):
            match step:
                case Began():
                    self._start_over()
                case Part(_, stored):
                    self._say(stored)
                case Changes(_, events):
                    self._say(events)
                case Ended():
                    self._kept.end_snapshot()
            if self._kept.is_due(self.way):
                self._say_again(source)
            self.way.serve()

    def _start_over(self) -> None:
        """What the readers have is not what we think that they have: clear it."""
        topics = sorted(self._view.topics | self._unsure)
        self._view.forget()
        self._kept.begin()
        self._unsure.update(topics)
        self._send([Told(topic, AllBlocksCleared()) for topic in topics])
        self._unsure.clear()
        if self.problem:
            _log.info("%s works again", self.way.name)
        self.problem = ""

    def _say_again(self, source: SnapshotSource) -> None:
        """A snapshot between the changes. Those that follow start before its first slice, so it is as good as any."""
        self._kept.begin()
        for stored in slices(source):
            self._say(stored)
            self.way.serve()
        self._kept.end_snapshot()

    def _say(self, events: Iterable[IndexEvent]) -> None:
        told: list[Told] = []
        for event in events:
            told += self._view.tell(event)
        if told:
            self._send(told)

    def _send(self, told: list[Told]) -> None:
        messages = [(topic, self._payload(events)) for topic, events in messages_of(told)]
        try:
            self.way.send(messages)
        except OutFailed:
            self._unsure.update(topic for topic, _ in messages)
            raise
        self._kept.count(messages)

    def _payload(self, events: tuple[KvEvent, ...]) -> bytes:
        # Dynamo 1.6 reads no batch without a rank.
        return encode_batch(KvEventBatch(self._now_s(), events, dp_rank=0))


def messages_of(told: Iterable[Told]) -> list[tuple[str, tuple[KvEvent, ...]]]:
    """One message per topic, several when there is much to say. The order on each topic stays."""
    done: list[tuple[str, tuple[KvEvent, ...]]] = []
    open_ones: dict[str, tuple[list[KvEvent], int]] = {}
    for one in told:
        events, num_bytes = open_ones.get(one.topic, ([], 0))
        events.append(one.event)
        num_bytes += _wire_bytes(one.event)
        if num_bytes >= MESSAGE_BYTES:
            done.append((one.topic, tuple(events)))
            open_ones.pop(one.topic, None)
        else:
            open_ones[one.topic] = (events, num_bytes)
    return [*done, *((topic, tuple(events)) for topic, (events, _) in open_ones.items())]


def _wire_bytes(event: KvEvent) -> int:
    match event:
        case BlockStored(block_hashes=hashes, tokens=tokens):
            return _EVENT_WIRE_BYTES + _HASH_WIRE_BYTES * len(hashes) + _TOKEN_WIRE_BYTES * (len(tokens) // TOKEN_BYTES)
        case BlockRemoved(block_hashes=hashes):
            return _EVENT_WIRE_BYTES + _HASH_WIRE_BYTES * len(hashes)
        case _:
            return _EVENT_WIRE_BYTES
