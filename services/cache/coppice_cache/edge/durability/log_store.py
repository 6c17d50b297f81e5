"""Where the recovery log lies in Redis or Valkey: one list per stream, and a head that names the stream that counts.

    coppice:index:head         "<cache epoch>:<stream id in hex>"
    coppice:index:<stream id>  list of records (log_codec): a snapshot, then what changed since

A stream begins with a snapshot and counts from the moment when the head names it; the one before is deleted then. So a
reader always finds a whole snapshot, whenever the writer died. A stream that was begun and never finished goes by its
time to live, and so does the whole log of a deployment that is gone.

Records are pushed with RPUSHX and the length is compared: a list that somebody deleted or wrote to is lost, and the
next snapshot starts another. A stream is never written to after an error, because nobody knows what arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from coppice.errors import UsageError
from coppice.handles import HANDLE_BYTES
from coppice.ids import CacheEpoch, WorkerId
from coppice_cache.core.base.events import IndexEvent, Stored
from coppice_cache.edge.durability.log_codec import (
    STREAM_BYTES,
    CorruptLog,
    LogKeys,
    num_bytes,
    open_record,
    seal_record,
)

HEAD_KEY = "coppice:index:head"
RECORD_BYTES = 64 << 10  # what a record is filled up to
UNFINISHED_TTL_S = 600
STREAM_TTL_S = 24 * 3600
TIMEOUT_S = 1.0
_RECORDS_PER_PAGE = 64
# Names the stream, unless a later incarnation has named its own; returns what was named before.
_SWITCH = """
local before = redis.pcall('GET', KEYS[1])
if type(before) ~= 'string' then before = '' end
local epoch = tonumber(string.match(before, '^(%d+):') or '0')
if epoch > tonumber(ARGV[1]) then return false end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], 'EX', ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return before
"""


class StreamLost(Exception):
    """The stream in Redis is not what was written: deleted, or written to by somebody else."""


class Superseded(Exception):
    """A later incarnation of the service writes the log."""


@dataclass(slots=True)
class LoadedLog:
    """What could be read: events by worker in the order in which they happened. `problem` says what ended it early."""

    by_worker: dict[WorkerId, list[IndexEvent]] = field(default_factory=dict)
    num_records: int = 0
    num_blocks: int = 0  # stored, removed ones included
    problem: str = ""


def connect_log(url: str, password: str = "") -> redis.Redis:
    """A client of its own, since records are bytes; nothing is sent yet. Raises UsageError for a malformed URL."""
    retry = Retry(NoBackoff(), 0)
    try:
        return redis.Redis.from_url(
            url,
            password=password or None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=retry,
        )
    except (ValueError, redis.RedisError) as error:
        raise UsageError(f"--redis-url: {error}", hint="such as redis://127.0.0.1:6379/0") from error


def load(
    client: redis.Redis, keys: LogKeys, *, budget_s: float = 5.0, now_s: Callable[[], float] = time.monotonic
) -> LoadedLog:
    """Read the stream that counts, for at most about `budget_s`. Never raises: what cannot be read is not there."""
    loaded = LoadedLog()
    deadline_s = now_s() + budget_s
    try:
        stream = _head_stream(client)
        while stream and _read_page(client, keys, stream, loaded):
            if now_s() > deadline_s:
                loaded.problem = "reading took too long"
                break
    except (redis.RedisError, OSError, CorruptLog) as error:
        loaded.problem = str(error) or repr(error)
    return loaded


class LogStream:
    """The writing end of one stream. After any error it must not be used again."""

    def __init__(self, client: redis.Redis, keys: LogKeys) -> None:
        self._client = client
        self._keys = keys
        self._id = os.urandom(STREAM_BYTES)
        self._key = stream_key(self._id)
        self.num_records = 0
        self.num_bytes = 0

    def append(self, events: Iterable[IndexEvent]) -> None:
        """Raises RedisError, OSError, StreamLost."""
        records = [self._sealed(part) for part in _parts(events)]
        if not records:
            return
        if self.num_records == len(records):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.rpush(self._key, *records)
            pipeline.expire(self._key, UNFINISHED_TTL_S)
            length = pipeline.execute()[0]
        else:
            length = self._client.execute_command("RPUSHX", self._key, *records)  # type: ignore[no-untyped-call]
        if length != self.num_records:
            raise StreamLost(f"the log has {length} records in Redis; {self.num_records} were written")

    def name(self, cache_epoch: CacheEpoch) -> None:
        """From now on this stream counts, and the one before is gone. Raises RedisError, OSError, Superseded."""
        if not self.num_records:
            self.append_mark()
        named = (HEAD_KEY, self._key, str(cache_epoch), self._id.hex(), str(STREAM_TTL_S))
        before = self._client.eval(_SWITCH, 2, *named)
        if before is None:
            self._client.unlink(self._key)
            raise Superseded("a later incarnation of the cache service writes the log")
        old = _parse_head(before)
        if old and old != self._id:
            self._client.unlink(stream_key(old))

    def append_mark(self) -> None:
        """A record without events: a list that is empty does not exist."""
        self.num_records += 1
        self._client.rpush(self._key, seal_record(self._keys, self._id, 0, ()))

    def confirm(self) -> None:
        """Look whether it is still there, and make it live longer. Raises RedisError, OSError, StreamLost."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.llen(self._key)
        pipeline.expire(self._key, STREAM_TTL_S)
        pipeline.get(HEAD_KEY)
        pipeline.expire(HEAD_KEY, STREAM_TTL_S)
        length, _, head, _ = pipeline.execute()
        if length != self.num_records or _parse_head(head) != self._id:
            raise StreamLost("the log was deleted from Redis, or somebody else writes one")

    def discard(self) -> None:
        """Delete what was begun. Raises RedisError, OSError."""
        self._client.unlink(self._key)

    def _sealed(self, events: list[IndexEvent]) -> bytes:
        record = seal_record(self._keys, self._id, self.num_records, events)
        self.num_records += 1
        self.num_bytes += len(record)
        return record


def stream_key(stream: bytes) -> str:
    return f"coppice:index:{stream.hex()}"


def _parts(events: Iterable[IndexEvent]) -> Iterable[list[IndexEvent]]:
    """Records' worth of events."""
    part: list[IndexEvent] = []
    size = 0
    for event in events:
        part.append(event)
        size += num_bytes(event)
        if size >= RECORD_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _head_stream(client: redis.Redis) -> bytes:
    """Empty when there is no log. Raises CorruptLog for a head that names none."""
    head = client.get(HEAD_KEY)
    stream = _parse_head(head)
    if head is not None and not stream:
        raise CorruptLog(f"{HEAD_KEY} names no stream")
    return stream


def _parse_head(head: object) -> bytes:
    """The stream's id; empty when the head is missing or something else."""
    if not isinstance(head, bytes):
        return b""
    _, _, name = head.partition(b":")
    try:
        stream = bytes.fromhex(name.decode("ascii"))
    except ValueError:
        return b""
    return stream if len(stream) == STREAM_BYTES else b""


def _read_page(client: redis.Redis, keys: LogKeys, stream: bytes, loaded: LoadedLog) -> bool:
    """Whether more may follow."""
    start = loaded.num_records
    page = client.lrange(stream_key(stream), start, start + _RECORDS_PER_PAGE - 1)
    for record in page:
        assert isinstance(record, bytes), "the client of the log must not decode"
        _take(loaded, open_record(keys, stream, loaded.num_records, record))
        loaded.num_records += 1
    return len(page) == _RECORDS_PER_PAGE


def _take(loaded: LoadedLog, events: list[IndexEvent]) -> None:
    for event in events:
        loaded.by_worker.setdefault(event.worker_id, []).append(event)
        if isinstance(event, Stored):
            loaded.num_blocks += len(event.handles) // HANDLE_BYTES
