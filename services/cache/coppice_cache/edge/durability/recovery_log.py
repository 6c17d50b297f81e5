"""Keeps the recovery log up to date: a thread that reads the core's events and writes them to Redis.

    wait until the replay of the last log is over
    snapshot, slice by slice, each after the events that came before it ----> a new stream, named when it is whole
    follow the events ------------------------------------------------------> the same stream, until it is long: anew

Slices and events are written in the order in which the core made them, so a reader that applies all of them ends with
what was findable. The core never waits for Redis: when this thread falls too far behind, the hub forgets what it has
not read, and a fresh snapshot makes up for it. The same happens when Redis was gone, emptied or written to by others.
What is lost with a tail of the log costs a recomputation, never a wrong block (DESIGN 8): nothing in it is trusted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import redis

from coppice.ids import CacheEpoch
from coppice_cache.core.base.events import IndexEvent, Stored
from coppice_cache.edge.durability.log_codec import LogKeys
from coppice_cache.edge.durability.log_store import LogStream, StreamLost, Superseded
from coppice_cache.edge.service.event_hub import Batch, EventHub, HubClosed, Overrun, Position
from coppice_cache.edge.service.locked_core import CoreBroken

_log = logging.getLogger("coppice.cache")
SLICE_BLOCKS = 256  # per visit to the core: below a millisecond, with one block to a node
IDLE_S = 1.0  # how long to wait for events before looking after the stream
RETRY_S = 2.0
LONG_RETRY_S = 60.0  # where a whole snapshot is likely to be in vain again
REPLAY_POLL_S = 0.2
GROWTH_BYTES_MIN = 8 << 20  # a stream is written anew when it has doubled, but not below this growth
LOG_BYTES_MAX = 2 << 30


class Behind(Exception):
    """Events were forgotten before they were read, or another incarnation began."""


class TooLong(Exception):
    """The index does not fit into the log."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a snapshot: what it stores, and the last event before it. `next_cursor` is None at the end."""

    events: tuple[Stored, ...]
    position: Position
    next_cursor: object | None


class IndexSource(Protocol):
    """What the log is made of, beside the hub's events. Any thread may ask."""

    @property
    def cache_epoch(self) -> CacheEpoch: ...

    @property
    def is_replaying(self) -> bool:
        """Whether the last log may still be needed: some of it is not judged yet."""
        ...

    def snapshot_slice(self, cursor: object | None, max_blocks: int) -> Slice: ...


@dataclass(frozen=True, slots=True)
class LogStatus:
    """`problem` is empty while the log is kept; `snapshot_age_s` is None before the first snapshot is whole."""

    problem: str
    lag_events: int
    snapshot_age_s: float | None
    num_bytes: int


class RecoveryLog:
    """`run` is the thread's; `problem` and `status` may be asked by any."""

    def __init__(
        self,
        client: redis.Redis,
        keys: LogKeys,
        source: IndexSource,
        hub: EventHub,
        *,
        max_bytes: int = LOG_BYTES_MAX,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._source = source
        self._hub = hub
        self._events = hub.subscribe()
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._stream: LogStream | None = None
        self._written = hub.position
        self._snapshot_bytes = 0
        self._snapshot_s: float | None = None
        self._problem = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.run, name="recovery log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, if Redis takes it at once. To be called before the hub is closed."""
        self._stopping.set()
        self._events.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._events.close()
        self._client.close()

    @property
    def problem(self) -> str:
        """Why no log is kept at the moment; empty when it is, or is about to be."""
        return self._problem

    def status(self) -> LogStatus:
        stream, position = self._stream, self._hub.position
        age_s = None if self._snapshot_s is None else self._now_s() - self._snapshot_s
        written = self._written.sequence if stream is not None and self._written.stream == position.stream else 0
        num_bytes = stream.num_bytes if stream is not None else 0
        return LogStatus(self._problem, max(0, position.sequence - written), age_s, num_bytes)

    def run(self) -> None:
        try:
            while self._source.is_replaying:
                if self._stopping.wait(REPLAY_POLL_S):
                    return
            while not self._stopping.is_set():
                self._stopping.wait(self.keep())
            if self._stream is not None:
                self._guarded(lambda: self.follow(0.0))
        except (HubClosed, CoreBroken):
            return  # the service is about to end

    def keep(self) -> float:
        """One step: a snapshot where there is none that counts, else what happened since. Returns seconds to pause."""
        return self._guarded(self._step)

    def _step(self) -> None:
        if self._stream is None or self._is_long(self._stream):
            self.snapshot()
        else:
            self.follow(IDLE_S)

    def snapshot(self) -> None:
        """Write a new stream and let it count. Raises what `LogStream` raises, Behind, TooLong and HubClosed."""
        stream, self._stream = LogStream(self._client, self._keys), None
        try:
            self._write_snapshot(stream)
        except Exception:
            with suppress(redis.RedisError, OSError):
                stream.discard()  # it would fill Redis until its time to live is over
            raise

    def _write_snapshot(self, stream: LogStream) -> None:
        part = self._source.snapshot_slice(None, SLICE_BLOCKS)
        stream.append(part.events)
        while part.next_cursor is not None:
            if self._stopping.is_set():
                stream.discard()
                return
            written, part = part.position, self._source.snapshot_slice(part.next_cursor, SLICE_BLOCKS)
            for events in self._between(written, part.position):
                stream.append(events)
            stream.append(part.events)
            if stream.num_bytes > self._max_bytes:
                raise TooLong(f"the index needs more than {self._max_bytes} bytes in Redis")
        stream.name(self._source.cache_epoch)
        self._stream, self._written = stream, part.position
        self._snapshot_bytes, self._snapshot_s = stream.num_bytes, self._now_s()

    def follow(self, timeout_s: float) -> None:
        """Append what happened; look after the stream when nothing did. Raises as `snapshot` does."""
        assert self._stream is not None
        batch = self._read(self._written, timeout_s)
        if batch.events:
            self._stream.append(batch.events)
        else:
            self._stream.confirm()
        self._written = batch.position

    def _between(self, written: Position, end: Position) -> Iterator[tuple[IndexEvent, ...]]:
        """Events after `written` and up to `end`; all of them happened already."""
        if written.stream != end.stream:
            raise Behind("another incarnation began")
        while written.sequence < end.sequence:
            batch = self._read(written, 0.0)
            yield batch.events[: end.sequence - written.sequence]
            written = batch.position

    def _read(self, after: Position, timeout_s: float) -> Batch:
        batch = self._events.read(after, timeout_s)
        if isinstance(batch, Overrun):
            raise Behind("events were made faster than Redis took them, or another incarnation began")
        return batch

    def _is_long(self, stream: LogStream) -> bool:
        growth = stream.num_bytes - self._snapshot_bytes
        return growth > max(GROWTH_BYTES_MIN, self._snapshot_bytes)

    def _guarded(self, step: Callable[[], None]) -> float:
        """Seconds to pause: none after a step that went well. Else the stream is given up, and a fresh one is due."""
        try:
            step()
        except (Behind, StreamLost) as lost:
            self._stream = None
            _log.info("recovery log: %s; a fresh snapshot follows", lost)
            return RETRY_S
        except (redis.RedisError, OSError, Superseded, TooLong) as error:
            self._stream = None
            if not self._problem:
                _log.warning("the recovery log is not kept: %s; serving goes on without it", error)
            self._problem = f"the recovery log is not kept: {error}"
            in_vain = isinstance(error, (Superseded, TooLong, redis.exceptions.OutOfMemoryError))
            return LONG_RETRY_S if in_vain else RETRY_S
        if self._problem and self._stream is not None:
            _log.info("the recovery log is kept again")
            self._problem = ""
        return 0.0
