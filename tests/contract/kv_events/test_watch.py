"""`Watch` over real gRPC, on trees that a test changes: snapshot, changes, exact resume, and clients that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from coppice.edge.grpc_server import CHANNEL_OPTIONS, GrpcServer
from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.edge.api.admin_grpc import PrefixIndexAdminServicer
from coppice_cache.edge.events.token_rule import TokenRule
from coppice_cache.edge.events.watching import Watchers
from coppice_cache.edge.service.event_hub import EventHub
from coppice_rpc.v1 import cache_admin_pb2 as pb
from coppice_rpc.v1 import cache_admin_pb2_grpc
from tests.fakes.cache.index_trees import FakeTrees, PlainConsumer
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
STREAM = 77


class Service:
    """The part of the cache service that answers `Watch`."""

    def __init__(self, *, events_max: int = 64, **limits: Any) -> None:
        self.hub = EventHub(STREAM, events_max=events_max)
        self.trees = FakeTrees(self.hub)
        self.watchers = Watchers(self.hub, self.trees, TokenRule(is_on=True), **{"still_s": 0.05, **limits})
        self.watchers.start()
        servicer = PrefixIndexAdminServicer(self.watchers, None)  # type: ignore[arg-type]  # only Watch is called
        self._server = GrpcServer("127.0.0.1:0", (), servicer.add_to, "watch")
        self._server.start()
        self.port = self._server.port

    def stop(self) -> None:
        self.hub.close()
        self._server.stop(1.0)
        self.watchers.stop()


@dataclass
class Watcher:
    """A client that keeps what it was told."""

    port: int
    consumer: PlainConsumer = field(default_factory=PlainConsumer)
    stream: int = 0
    sequence: int = 0
    snapshots: int = 0
    snapshot_blocks: int = 0
    is_whole: bool = False
    with_tokens: bool = True

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=CHANNEL_OPTIONS)
        self.stub = cache_admin_pb2_grpc.PrefixIndexAdminStub(self.channel)
        self.call: Any = None
        self.watch()

    def watch(self) -> None:
        """From where it was, or from the beginning."""
        request = pb.WatchRequest(
            resume_stream=self.stream, resume_sequence=self.sequence, with_tokens=self.with_tokens, domains=("a", "b")
        )
        self.call = self.stub.Watch(request)

    def drop(self) -> None:
        self.call.cancel()

    def messages(self) -> Iterator[pb.WatchResponse]:
        yield from self.call

    def catch_up(self, hub: EventHub) -> None:
        """Read until it knows of all that has happened up to now."""
        now = hub.position
        while not (self.is_whole and self.stream == now.stream and self.sequence >= now.sequence):
            self.take(next(self.messages()))

    def take(self, message: pb.WatchResponse) -> None:
        kind = message.WhichOneof("change")
        self.stream = message.stream
        if kind == "snapshot_begin":
            self.consumer.begin()
            self.snapshots += 1
            self.is_whole = False
            self.sequence = 0
        elif kind == "snapshot_end":
            self.is_whole = True
            self.snapshot_blocks = message.snapshot_end.num_blocks
            self.sequence = message.sequence
        elif kind is None:
            assert message.sequence == self.sequence
        else:
            if self.is_whole:
                assert message.sequence == self.sequence + 1, "without gaps"
                self.sequence = message.sequence
            else:
                assert message.sequence == 0, "nobody can resume from inside of a snapshot"
            self.consumer.apply(event_of(message))

    def stop(self) -> None:
        self.drop()
        self.channel.close()


def event_of(message: pb.WatchResponse) -> IndexEvent:
    wire = getattr(message, message.WhichOneof("change"))
    head = (WorkerId(wire.worker_id), WorkerEpoch(wire.worker_epoch), DomainId(wire.domain), Namespace(wire.namespace))
    match wire:
        case pb.BlocksStored():
            return Stored(*head, wire.parent_seal, wire.tokens, wire.handles, wire.seals, Tier(wire.tier))
        case pb.BlocksRemoved():
            return Removed(*head, wire.handles, wire.seals, Tier(wire.tier), wire.all_below)
        case _:
            return Cleared(*head)


@pytest.fixture
def service(keep: Keep) -> Service:
    started = keep(Service())
    assert isinstance(started, Service)
    return started


def fill(trees: FakeTrees) -> None:
    trees.store(trees.place("w0", "a", "m", (1, 2, 1)))
    trees.store(trees.place("w0", "b", "m", (1,), Tier.HOST))
    trees.store(trees.place("w1", "a", "n", (2, 2)))


def stir(trees: FakeTrees) -> None:
    """Some of each kind of change."""
    trees.remove(trees.place("w0", "a", "m", (1, 2, 1)))
    trees.store(trees.place("w0", "a", "m", (1, 1)))
    trees.clear("a", "n", "w1")
    trees.store(trees.place("w1", "a", "n", (2,)))
    trees.reclaim()
    trees.end_worker("w0")
    trees.store(trees.place("w0", "a", "m", (2,)))


def test_a_snapshot_then_every_change(service: Service, keep: Keep) -> None:
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()
    assert (watcher.stream, watcher.sequence, watcher.snapshot_blocks) == (STREAM, 3, 6)
    stir(service.trees)
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()
    assert watcher.snapshots == 1


def test_changes_between_slices_are_not_lost(service: Service, keep: Keep) -> None:
    fill(service.trees)
    rounds = [fill, stir]
    service.trees.between = lambda: rounds.pop()(service.trees) if rounds else None
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    assert not rounds, "both happened while the snapshot was read"
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()


def test_a_dropped_connection_goes_on_where_it_was(service: Service, keep: Keep) -> None:
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    watcher.drop()
    stir(service.trees)
    watcher.watch()
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()
    assert watcher.snapshots == 1


def test_a_drop_inside_of_a_snapshot_starts_over(service: Service, keep: Keep) -> None:
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    for _ in range(3):
        watcher.take(next(watcher.messages()))
    watcher.drop()
    stir(service.trees)
    watcher.watch()
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()
    assert watcher.snapshots == 2


def test_a_position_that_is_too_old_gets_a_snapshot(keep: Keep) -> None:
    service = keep(Service(events_max=4))
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    watcher.drop()
    stir(service.trees)
    fill(service.trees)
    watcher.watch()
    watcher.catch_up(service.hub)
    assert watcher.consumer.blocks == service.trees.findable()
    assert watcher.snapshots == 2


def test_another_incarnation_gets_a_snapshot_and_tells_open_streams(service: Service, keep: Keep) -> None:
    fill(service.trees)
    open_one, dropped = keep(Watcher(service.port)), keep(Watcher(service.port))
    for watcher in (open_one, dropped):
        watcher.catch_up(service.hub)
    dropped.drop()
    service.trees.blocks.clear()
    service.hub.restart(STREAM + 1)
    service.trees.store(service.trees.place("w0", "a", "m", (2, 2)))
    dropped.watch()
    for watcher in (open_one, dropped):
        watcher.catch_up(service.hub)
        assert (watcher.stream, watcher.snapshots) == (STREAM + 1, 2)
        assert watcher.consumer.blocks == service.trees.findable()


def test_tokens_are_left_out_unless_asked_for(service: Service, keep: Keep) -> None:
    fill(service.trees)
    watcher = keep(Watcher(service.port))

    def stored() -> list[pb.BlocksStored]:
        found = []
        for message in watcher.messages():
            if message.WhichOneof("change") == "snapshot_end":
                return found
            if message.HasField("stored"):
                found.append(message.stored)
        raise AssertionError("the stream ended")

    with_tokens = stored()
    watcher.drop()
    watcher.with_tokens = False
    watcher.watch()
    without = stored()
    assert all(one.tokens and one.seals for one in with_tokens)
    assert all(not one.tokens and one.seals for one in without)
    assert [one.handles for one in with_tokens] == [one.handles for one in without]


def test_a_watcher_hears_that_nothing_happens(service: Service, keep: Keep) -> None:
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    still = next(watcher.messages())
    assert (still.WhichOneof("change"), still.stream, still.sequence) == (None, STREAM, 3)


def test_the_number_of_watchers_is_bounded(keep: Keep) -> None:
    service = keep(Service(watchers_max=2))
    first, second = keep(Watcher(service.port)), keep(Watcher(service.port))
    for watcher in (first, second):
        watcher.catch_up(service.hub)
    third = keep(Watcher(service.port))
    with pytest.raises(grpc.RpcError) as caught:
        next(third.messages())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 watchers" in caught.value.details()
    first.drop()
    wait_for(lambda: service.watchers.num_watchers == 1, "the place of the one who left is free")
    third.watch()
    third.catch_up(service.hub)


def test_a_client_that_does_not_read_is_ended(keep: Keep) -> None:
    service = keep(Service(events_max=10_000, stall_s=0.3))
    fill(service.trees)
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    big = Stored(WorkerId("w0"), WorkerEpoch(1), DomainId("a"), Namespace(b""), b"", bytes(1 << 20), b"", b"")
    for _ in range(30):
        service.hub.publish([big])
    wait_for(lambda: service.watchers.num_watchers == 0, "its place is free")
    with pytest.raises(grpc.RpcError) as caught:
        list(watcher.messages())
    assert caught.value.code() == grpc.StatusCode.CANCELLED


def test_a_stop_ends_the_streams(keep: Keep) -> None:
    service = Service()
    watcher = keep(Watcher(service.port))
    watcher.catch_up(service.hub)
    service.hub.close()
    with pytest.raises(grpc.RpcError) as caught:
        list(watcher.messages())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    service.stop()
