"""The event streams of a fleet and the tree that they feed.

    feed (one endpoint)  ->  stream (one publisher's sequence)  ->  source (one data-parallel rank)  ->  tree

With a replay socket a feed is one publisher. Without one, several may share an endpoint, apart by topic and rank.
A source is visible while its stream is trusted: during recovery it is withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coppice.messages.kv_events import UnknownEvent
from coppice_cache.engine_index.core.event_stream import (
    Apply,
    AskReplay,
    Clear,
    Effect,
    EventStream,
    Message,
    StreamCounts,
    StreamLimits,
)
from coppice_cache.engine_index.core.tree import AdvisoryLimits, AdvisoryTree, SourceCounts, SourceId

FeedId = int
TOPIC_MARK = "kv"


@dataclass(frozen=True, slots=True)
class FleetLimits:
    tree: AdvisoryLimits = field(default_factory=AdvisoryLimits)
    stream: StreamLimits = field(default_factory=StreamLimits)
    streams_per_feed_max: int = 256


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message and where it came from. topic: None where an older engine left it out of a replay."""

    topic: str | None
    message: Message


@dataclass(frozen=True, slots=True)
class FleetMatch:
    source: str
    model: str
    dp_rank: int
    matched_tokens: int
    by_medium: dict[str, int]


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """next_sequence: of the next message that is expected. is_trusted: False while it recovers, and is withheld."""

    source: str
    model: str
    dp_rank: int
    feed: str
    is_connected: bool
    is_trusted: bool
    next_sequence: int
    counts: StreamCounts
    blocks: SourceCounts
    unknown_events: int


@dataclass(slots=True)
class _Stream:
    sequence: EventStream
    topic: str
    sources: dict[int, SourceId] = field(default_factory=dict)
    unknown_events: int = 0


@dataclass(slots=True)
class _Feed:
    name: str
    can_replay: bool
    is_connected: bool = False
    streams: dict[tuple[str, int], _Stream] = field(default_factory=dict)
    num_refused: int = 0


class Fleet:
    """Not safe for threads: the caller has the lock. What is returned are sequences to ask a feed's replay from."""

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self._limits = limits or FleetLimits()
        self._tree = AdvisoryTree(self._limits.tree)
        self._feeds: list[_Feed] = []

    def add_feed(self, name: str, *, can_replay: bool) -> FeedId:
        feed = _Feed(name, can_replay)
        if can_replay:  # there is one publisher, and it is asked before it says anything
            feed.streams["", 0] = _Stream(EventStream(self._limits.stream, can_replay=True), "")
        self._feeds.append(feed)
        return len(self._feeds) - 1

    # ---- what happens ----

    def live(self, feed_id: FeedId, delivery: Delivery, now_ns: int) -> list[int]:
        feed = self._feeds[feed_id]
        feed.is_connected = True
        asked: list[int] = []
        for stream in self._streams_of(feed, delivery):
            asked += self._carry_out(stream, stream.sequence.live(delivery.message, now_ns))
        return asked

    def replayed(self, feed_id: FeedId, delivery: Delivery, now_ns: int) -> list[int]:
        asked: list[int] = []
        for stream in self._streams_of(self._feeds[feed_id], delivery):
            asked += self._carry_out(stream, stream.sequence.replayed(delivery.message, now_ns))
        return asked

    def replay_ended(self, feed_id: FeedId, now_ns: int) -> list[int]:
        return self._on_all(feed_id, lambda stream: stream.replay_ended(now_ns))

    def connected(self, feed_id: FeedId, now_ns: int) -> list[int]:
        self._feeds[feed_id].is_connected = True
        return self._on_all(feed_id, lambda stream: stream.connected(now_ns))

    def disconnected(self, feed_id: FeedId) -> list[int]:
        """Hand in first what came over the connection."""
        self._feeds[feed_id].is_connected = False
        return self._on_all(feed_id, lambda stream: stream.disconnected())

    def expire(self, feed_id: FeedId, now_ns: int) -> list[int]:
        return self._on_all(feed_id, lambda stream: stream.expire(now_ns))

    def collect(self, limit: int) -> bool:
        """Memory of cleared blocks; call again while there is more."""
        return self._tree.collect(limit)

    def _on_all(self, feed_id: FeedId, happens: Callable[[EventStream], list[Effect]]) -> list[int]:
        asked: list[int] = []
        for stream in list(self._feeds[feed_id].streams.values()):
            asked += self._carry_out(stream, happens(stream.sequence))
        return asked

    def _streams_of(self, feed: _Feed, delivery: Delivery) -> list[_Stream]:
        """Of one message: its stream. An unreadable one does not say its rank: whichever waits for that number."""
        if feed.can_replay:
            stream = feed.streams["", 0]
            stream.topic = delivery.topic or stream.topic
            return [stream]
        topic, message = delivery.topic or "", delivery.message
        if message.batch is None:
            known = [stream for (of, _), stream in feed.streams.items() if of == topic]
            return [stream for stream in known if stream.sequence.next == message.sequence]
        key = topic, message.batch.dp_rank or 0
        if key not in feed.streams:
            if len(feed.streams) >= self._limits.streams_per_feed_max:
                feed.num_refused += 1
                return []
            feed.streams[key] = _Stream(EventStream(self._limits.stream, can_replay=False), topic)
        return [feed.streams[key]]

    def _carry_out(self, stream: _Stream, effects: list[Effect]) -> list[int]:
        asked: list[int] = []
        for effect in effects:
            match effect:
                case Apply():
                    self._apply(stream, effect)
                case Clear():
                    for source in stream.sources.values():
                        self._tree.clear(source)
                case AskReplay(start):
                    asked.append(start)
        for source in stream.sources.values():
            self._tree.set_visible(source, stream.sequence.is_trusted)
        return asked

    def _apply(self, stream: _Stream, effect: Apply) -> None:
        rank = effect.batch.dp_rank or 0
        source = stream.sources.get(rank)
        if source is None:
            source = self._tree.open()
            if source is None:
                stream.unknown_events += len(effect.batch.events)
                return
            stream.sources[rank] = source
        for event in effect.batch.events:
            if isinstance(event, UnknownEvent):
                stream.unknown_events += 1
            self._tree.apply(source, event)

    # ---- questions ----

    def match(self, tokens: bytes, lora: bytes, salt: bytes, only: Iterable[str] | None = None) -> list[FleetMatch]:
        """Longest cached prefix for each trusted source, the longest first. tokens: packed u32. only: source names."""
        wanted = None if only is None else set(only)
        names = {
            source: (self._name(feed, stream), self._model(stream), rank)
            for feed in self._feeds
            for stream in feed.streams.values()
            for rank, source in stream.sources.items()
            if wanted is None or self._name(feed, stream) in wanted
        }
        found = [
            FleetMatch(*names[hit.source], hit.tokens, hit.by_tier)
            for hit in self._tree.match(tokens, lora, salt, names)
        ]
        return sorted(found, key=lambda hit: (-hit.matched_tokens, hit.source, hit.dp_rank))

    def sources(self) -> list[SourceStatus]:
        """Every source, and every publisher that has not said anything yet."""
        return [
            status for feed in self._feeds for stream in feed.streams.values() for status in self._status(feed, stream)
        ]

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes

    @property
    def num_refused_streams(self) -> int:
        return sum(feed.num_refused for feed in self._feeds)

    def _status(self, feed: _Feed, stream: _Stream) -> list[SourceStatus]:
        nothing = SourceCounts(0, 0, 0, ())
        known = {rank: self._tree.counts(source) for rank, source in stream.sources.items()} or {0: nothing}
        return [
            SourceStatus(
                self._name(feed, stream),
                self._model(stream),
                rank,
                feed.name,
                feed.is_connected,
                stream.sequence.is_trusted,
                stream.sequence.next,
                stream.sequence.counts,
                blocks,
                stream.unknown_events,
            )
            for rank, blocks in known.items()
        ]

    @staticmethod
    def _name(feed: _Feed, stream: _Stream) -> str:
        parts = stream.topic.split("@", 2)
        return parts[1] if parts[0] == TOPIC_MARK and len(parts) > 1 and parts[1] else feed.name

    @staticmethod
    def _model(stream: _Stream) -> str:
        parts = stream.topic.split("@", 2)
        return parts[2] if parts[0] == TOPIC_MARK and len(parts) > 2 else ""
