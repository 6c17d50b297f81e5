"""The events of the core, kept for a while for everybody who follows them.

    sequence    1 .. 40   41  42  43 ... 98        41 is the oldest that is kept, 98 the last that happened
                forgotten |<---- the ring --->|
    read(after 60) -> 61, 62, ...                  read(after 39) -> Overrun: start over with a snapshot

`publish` is called with the service's lock held. It takes no lock and wakes nobody who does not wait, so the core
never waits for a reader. What makes that safe is an order, under an interpreter that runs one thread at a time: a slot
is written before `last` moves past it, and `oldest` moves past a slot before it is written again. A reader copies
first and looks at `oldest` afterwards: what was overwritten meanwhile shows.

Nothing is kept before the first subscriber comes: nobody has seen a position in this stream yet, so nobody can ask for
what follows it. A stream is one incarnation of the service; after `restart` every position of before is an Overrun.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coppice_cache.core.base.events import Cleared, IndexEvent, Stored

EVENTS_MAX = 1 << 16
BYTES_MAX = 64 << 20
READ_MAX = 512  # events in one batch
EVENT_BYTES = 200  # what an event takes beside its packed fields
LINGER_S = 0.002  # a reader that was woken lets a burst come together, so that it does not interrupt the core each time


@dataclass(frozen=True, slots=True)
class Position:
    """`sequence` is that of the last event which was seen; 0 is before the first one."""

    stream: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive events; `position` is that of the last of them. Without events: none came in time."""

    position: Position
    events: tuple[IndexEvent, ...]


@dataclass(frozen=True, slots=True)
class Overrun:
    """What follows the position is not kept any more, or it is of another stream."""


class HubClosed(Exception):
    """The service is stopping: no more events."""


class _Ring:
    """The events of one stream. Written by one thread at a time, read by any."""

    def __init__(self, stream: int, size: int) -> None:
        self.stream = stream
        self.slots: list[IndexEvent | None] = [None] * size
        self.oldest = 1
        self.last = 0
        self.num_bytes = 0


class EventHub:
    """A bounded ring of events and those who read it. `stream` is not 0."""

    def __init__(self, stream: int, *, events_max: int = EVENTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        assert stream
        assert events_max > 0
        self._bytes_max = bytes_max
        self._events_max = events_max
        self._ring = _Ring(stream, events_max)
        self._lock = threading.Lock()  # of the subscribers among themselves; `publish` does not take it
        self._subscriptions: tuple[Subscription, ...] = ()
        self._is_keeping = False
        self.is_closed = False

    # ---- the core's side: one thread at a time ----

    def publish(self, events: Sequence[IndexEvent]) -> None:
        """Number these events and keep them. O(1) for each, never blocks."""
        ring = self._ring
        if not self._is_keeping:
            ring.last += len(events)
            ring.oldest = ring.last + 1
            return
        slots, size = ring.slots, self._events_max
        for event in events:
            ring.num_bytes += _bytes_of(event)
            sequence = ring.last + 1
            while ring.oldest < sequence and (sequence - ring.oldest >= size or ring.num_bytes > self._bytes_max):
                self._forget_oldest(ring)
            slots[sequence % size] = event
            ring.last = sequence
        if events:
            self._wake()

    def restart(self, stream: int) -> None:
        """Another incarnation: every position that anybody holds is void."""
        assert stream not in (0, self._ring.stream)
        self._ring = _Ring(stream, self._events_max)
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _forget_oldest(self, ring: _Ring) -> None:
        at = ring.oldest % self._events_max
        ring.oldest += 1
        gone = ring.slots[at]
        assert gone is not None
        ring.slots[at] = None
        ring.num_bytes -= _bytes_of(gone)

    def _wake(self) -> None:
        for subscription in self._subscriptions:
            if subscription.is_waiting:
                subscription.is_waiting = False
                subscription.wakes.put(None)

    # ---- the readers' side ----

    @property
    def position(self) -> Position:
        """Where the stream is now. For a snapshot: ask before its first slice is read."""
        ring = self._ring
        return Position(ring.stream, ring.last)

    def subscribe(self) -> Subscription:
        """A reader. From the first one on events are kept."""
        subscription = Subscription(self)
        with self._lock:
            self._is_keeping = True
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def _leave(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(other for other in self._subscriptions if other is not subscription)

    def _kept_after(self, after: Position) -> Batch | Overrun:
        ring = self._ring
        if after.stream != ring.stream or after.sequence > ring.last:
            return Overrun()
        first, end = after.sequence + 1, min(ring.last, after.sequence + READ_MAX) + 1
        size = self._events_max
        copied = [ring.slots[sequence % size] for sequence in range(first, end)]
        if ring.oldest > first:
            return Overrun()
        events = tuple(event for event in copied if event is not None)
        assert len(events) == end - first
        return Batch(Position(ring.stream, end - 1), events)


class Subscription:
    """One reader, for one thread. Close it: an abandoned one is looked at by every `publish`."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self.is_waiting = False
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read(self, after: Position, timeout_s: float) -> Batch | Overrun:
        """What follows `after`, at most READ_MAX events; waits for the first. Raises HubClosed."""
        found = self._look(after)
        if timeout_s <= 0 or isinstance(found, Overrun) or found.events:
            return found
        while not self.wakes.empty():  # of a wait that ended by itself at that moment
            self.wakes.get()
        self.is_waiting = True
        found = self._look(after)  # again: what came before the flag was up woke nobody
        if isinstance(found, Batch) and not found.events:
            self._wait(timeout_s)
            found = self._look(after)
        self.is_waiting = False
        return found

    def wake(self) -> None:
        """End a `read` that waits, from any thread."""
        self.wakes.put(None)

    def close(self) -> None:
        self._hub._leave(self)

    def _wait(self, timeout_s: float) -> None:
        try:
            self.wakes.get(timeout=timeout_s)
        except queue.Empty:
            return
        time.sleep(LINGER_S)

    def _look(self, after: Position) -> Batch | Overrun:
        if self._hub.is_closed:
            raise HubClosed
        return self._hub._kept_after(after)


def _bytes_of(event: IndexEvent) -> int:
    if isinstance(event, Cleared):
        return EVENT_BYTES
    packed = EVENT_BYTES + len(event.handles) + len(event.seals)
    return packed + len(event.tokens) if isinstance(event, Stored) else packed
