"""The whole way: ops over gRPC change the trees of a running cache service, and every follower has the same blocks.

Followers are a Watch client and a router that reads the field's KV events over ZMQ. The truth is read from the trees
under the service's lock.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice.errors import UnavailableError
from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.events import Tier
from coppice_cache.core.radix.tree import Node
from coppice_cache.edge.events.kv_events_zmq import ZmqOut
from coppice_cache.edge.service import service as service_module
from coppice_cache.edge.service.event_hub import EventHub
from coppice_rpc.v1 import cache_pb2 as pb
from tests.contract.kv_events.test_kv_events_out import ZmqRouter
from tests.contract.kv_events.test_watch import Watcher
from tests.fakes.cache.cache_ends import NAMESPACE, Cache, FakeWorker, UnaryClient, prompt
from tests.fakes.cache.index_trees import Block
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
TOPIC = f"kv@{{}}@{NAMESPACE.hex()}"
DOMAINS = ("a", "b")
START_S = 60


class World:
    """A cache service with one worker, and somebody who uses it. Blocks are few, so most publications evict."""

    def __init__(self, keep: Keep, **settings: Any) -> None:
        values = {
            "kv_events_zmq": ("tcp://127.0.0.1:*",),
            "kv_events_replay": ("tcp://127.0.0.1:*",),
            "kv_events_domains": ("a",),
            "kv_events_tokens": True,
        }
        self.cache = keep(Cache(**{**values, **settings}))
        self.worker = keep(FakeWorker(self.cache)).wait_registered()
        self.client = keep(UnaryClient(self.cache))
        self._random = random.Random(3)
        self._leases = 0

    @property
    def service(self) -> Any:
        return self.cache.process._service

    def use(self, times: int, worker_id: str = "w") -> None:
        """Prompts with common beginnings, of two domains."""
        candidates = [pb.Candidate(worker_id=worker_id)]
        for _ in range(times):
            self._leases += 1
            text = prompt(4, 1 + 4 * self._random.randrange(2)) + prompt(4, 20 + 4 * self._random.randrange(2))
            text += prompt(8, 100 * self._random.randrange(6))
            self.client.acquire(self._leases, text, self._random.choice(DOMAINS), candidates=candidates)
            self.client.publish(self._leases, text)
            self.client.release(self._leases)

    def invalidate(self, domain: str) -> None:
        with self.service.entered() as core:
            core.invalidate(domain=DomainId(domain), now_ns=self.service.now_ns())

    def invalidate_prefix(self, domain: str) -> None:
        """The first block of half the prompts, and all below it."""
        with self.service.entered() as core:
            core.invalidate(
                domain=DomainId(domain), namespace=NAMESPACE, tokens=prompt(4, 1), now_ns=self.service.now_ns()
            )

    def findable(self) -> set[Block]:
        with self.service.entered() as core:
            return {
                block
                for worker in core.state.workers.values()
                for tree in worker.trees.values()
                if worker.find_tree(tree.domain, tree.namespace) is tree
                for block in _blocks_below(worker, tree, tree)
            }

    def names(self) -> set[tuple[str, str, int]]:
        """What a router may know."""
        return {
            (TOPIC.format(block.worker_id), "GPU", int.from_bytes(block.seal[:8], "little"))
            for block in self.findable()
            if block.domain == "a"
        }

    def is_followed_by(self, watcher: Watcher) -> None:
        watcher.catch_up(self.service.hub)
        assert watcher.consumer.blocks == self.findable()

    def is_read_by(self, router: ZmqRouter) -> None:
        wait_for(lambda: (router.take() or True) and router.reader.has() == self.names(), "the router has every block")


def _blocks_below(worker: Any, tree: Any, node: Node) -> Iterator[Block]:
    seals = worker.ledger.seals_of(node.handles)
    for number in range(node.num_blocks):
        yield Block(
            worker.worker_id,
            worker.epoch,
            tree.domain,
            tree.namespace,
            Tier.DEVICE,
            node.handles[number * HANDLE_BYTES : (number + 1) * HANDLE_BYTES],
            seals[number * SEAL_BYTES : (number + 1) * SEAL_BYTES],
        )
    for child in node.children.values():
        yield from _blocks_below(worker, tree, child)


def router_of(world: World, keep: Keep, publisher: int = 0, worker_id: str = "w") -> ZmqRouter:
    """One whose subscription has arrived."""
    way = world.cache.process.kv_events[publisher].way
    assert isinstance(way, ZmqOut)
    router = keep(ZmqRouter(way.endpoint, way.replay_endpoint))
    assert isinstance(router, ZmqRouter)
    wait_for(lambda: world.use(1, worker_id) or router.take(), "the subscription has arrived")
    return router


def test_followers_see_what_is_in_the_trees(keep: Keep) -> None:
    world = World(keep)
    world.use(10)
    watcher = keep(Watcher(world.cache.admin_port, with_tokens=False))
    world.is_followed_by(watcher)
    assert watcher.snapshot_blocks
    router = router_of(world, keep)
    for _ in range(8):
        world.use(10)
        world.is_followed_by(watcher)
        world.is_read_by(router)
    assert watcher.snapshots == 1
    assert world.client.stats().cached_blocks == len(world.findable())
    assert any(domain.evicted_blocks for worker in world.service.stats().workers for domain in worker.domains)
    world.cache.audit()


def test_followers_see_invalidations_and_the_end_of_a_worker(keep: Keep) -> None:
    world = World(keep)
    watcher = keep(Watcher(world.cache.admin_port, with_tokens=False))
    router = router_of(world, keep)
    world.use(12)
    world.invalidate("a")
    assert {block.domain for block in world.findable()} == {"b"}
    world.is_followed_by(watcher)
    world.is_read_by(router)
    world.use(20)
    world.is_followed_by(watcher)
    world.is_read_by(router)
    world.worker.stop()
    other = keep(FakeWorker(world.cache)).wait_registered()
    assert other.epoch != world.worker.epoch
    wait_for(lambda: not world.findable(), "the epoch is dead")
    world.is_followed_by(watcher)
    world.is_read_by(router)
    world.use(10)
    world.is_followed_by(watcher)
    world.is_read_by(router)
    assert watcher.snapshots == 1
    assert world.names()


def test_followers_see_what_follows_a_prefix_go_and_come_again(keep: Keep) -> None:
    world = World(keep)
    watcher = keep(Watcher(world.cache.admin_port, with_tokens=False))
    router = router_of(world, keep)
    for _ in range(4):
        world.use(12)
        world.invalidate_prefix("a")
        world.is_followed_by(watcher)
        world.use(2)
        world.is_followed_by(watcher)
        world.is_read_by(router)
    assert watcher.snapshots == 1
    assert world.names()


def test_a_cut_connection_resumes_and_a_long_one_starts_over(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "EventHub", partial(EventHub, events_max=64))
    world = World(keep)
    world.use(5)
    proxy = keep(TcpProxy(world.cache.admin_port))
    watcher = keep(Watcher(proxy.port, with_tokens=False))
    world.is_followed_by(watcher)
    for times, snapshots in ((5, 1), (60, 2)):
        proxy.cut()
        with pytest.raises(grpc.RpcError):
            list(watcher.messages())
        world.use(times)
        watcher.watch()
        world.is_followed_by(watcher)
        assert watcher.snapshots == snapshots
    assert world.findable()


def test_each_worker_has_an_endpoint_of_its_own_where_one_is_named(keep: Keep) -> None:
    both = ("w=tcp://127.0.0.1:*", "w2=tcp://127.0.0.1:*")
    world = World(keep, kv_events_zmq=both, kv_events_replay=both)
    keep(FakeWorker(world.cache, "w2")).wait_registered()
    routers = [router_of(world, keep, number, worker_id) for number, worker_id in enumerate(("w", "w2"))]
    for _ in range(4):
        for worker_id in ("w", "w2"):
            world.use(5, worker_id)
    topics = [TOPIC.format(worker_id) for worker_id in ("w", "w2")]
    for router, topic in zip(routers, topics, strict=True):
        own = {name for name in world.names() if name[0] == topic}
        assert own
        wait_for(lambda router=router, own=own: (router.take() or True) and router.reader.has() == own, topic)


def test_a_slow_reader_does_not_hold_up_the_core(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads this stream at first; the service goes on, and the reader has everything in the end."""
    monkeypatch.setattr(service_module, "EventHub", partial(EventHub, events_max=16))
    world = World(keep)
    watcher = keep(Watcher(world.cache.admin_port, with_tokens=False))
    world.use(60)
    world.is_followed_by(watcher)
    router = router_of(world, keep)
    world.use(60)
    world.is_read_by(router)


def test_a_restart_of_the_service_is_another_stream(keep: Keep) -> None:
    world = World(keep)
    world.use(5)
    watcher = keep(Watcher(world.cache.admin_port, with_tokens=False))
    world.is_followed_by(watcher)
    before = watcher.stream
    watcher.drop()
    world.cache.restart()
    wait_for(lambda: len(world.worker.registered) > 1, "the worker is back")
    watcher.watch()
    world.is_followed_by(watcher)
    assert watcher.stream != before
    assert watcher.snapshots == 2


def test_an_endpoint_in_use_uses_up_no_epoch(keep: Keep, tmp_path: Path) -> None:
    taken = keep(ZmqOut("tcp://127.0.0.1:*", None))
    file = tmp_path / "epoch"
    with pytest.raises(UnavailableError, match="--kv-events-zmq: cannot listen"):
        Cache(kv_events_zmq=(taken.endpoint,), epoch_file=str(file))
    assert not file.exists()


def test_a_signal_ends_followers_and_publishers_in_order(keep: Keep, tmp_path: Path) -> None:
    log = tmp_path / "log"
    endpoint = f"ipc://{tmp_path}/kv"
    flags = [
        "--grpc-port=0",
        "--admin-grpc-port=0",
        "--http-port=0",
        "--session-port=0",
        "--kv-events-zmq",
        endpoint,
        "--kv-events-replay",
        endpoint + "r",
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-m", "coppice_cache", *flags], stderr=sink)
    try:
        said = r"for operators REST on \S+, gRPC on \S*:(\d+)"
        port = wait_for(lambda: re.search(said, log.read_text()), "the service listens", START_S)
        watcher = keep(Watcher(int(port[1]), with_tokens=False))
        router = keep(ZmqRouter(endpoint, endpoint + "r"))
        router.replay()
        while not watcher.is_whole:
            watcher.take(next(watcher.messages()))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            list(watcher.messages())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=START_S) == 0
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()
