"""Both directions together: `coppice index ingest` reads the KV events of our own cache service, as a router would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coppice_cache.edge.events.kv_events_zmq import ZmqOut
from coppice_cache.engine_index.ingest import FeedSpec, Ingest
from tests.contract.kv_events.test_index_followers import World
from tests.fakes.cache.cache_ends import prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
PROMPTS = [
    prompt(4, 1 + 4 * first) + prompt(4, 20 + 4 * second) + prompt(8, 100 * third) + prompt(1, 7)
    for first in range(2)
    for second in range(2)
    for third in range(6)
]


def ingest_of(world: World, keep: Keep) -> Ingest:
    way = world.cache.process.kv_events[0].way
    assert isinstance(way, ZmqOut)
    started = keep(Ingest([FeedSpec("w", way.endpoint, way.replay_endpoint)]))
    started.start()
    assert isinstance(started, Ingest)
    return started


def agrees(world: World, ingest: Ingest) -> bool:
    """For every prompt that is ever used, as long a prefix as the service itself finds."""
    found = [sum(hit.matched_tokens for hit in ingest.match(text, b"", b"", None)) for text in PROMPTS]
    return found == [world.client.match(text) for text in PROMPTS]


def test_an_ingest_finds_the_prefixes_that_the_service_finds(keep: Keep) -> None:
    world = World(keep)
    world.use(12)
    ingest = ingest_of(world, keep)
    for _ in range(6):
        world.use(10)
        wait_for(lambda: agrees(world, ingest), "every prefix is found, and none that is gone")
    assert any(world.client.match(text) for text in PROMPTS)
    world.invalidate("a")
    wait_for(lambda: agrees(world, ingest), "nothing is found any more")
    assert not any(world.client.match(text) for text in PROMPTS)
    world.use(10)
    wait_for(lambda: agrees(world, ingest), "and what came afterwards is")


@pytest.mark.wide
def test_an_ingest_survives_a_restart_of_the_service(keep: Keep) -> None:
    """The sequence starts again at 0, and nothing of before is found."""
    ports = ("tcp://127.0.0.1:*",)
    world = World(keep, kv_events_zmq=ports, kv_events_replay=ports)
    world.use(12)
    ingest = ingest_of(world, keep)
    wait_for(lambda: agrees(world, ingest), "every prefix is found")
    way = world.cache.process.kv_events[0].way
    assert isinstance(way, ZmqOut)
    world.client.stop()
    world.cache.restart(kv_events_zmq=(way.endpoint,), kv_events_replay=(way.replay_endpoint,))
    wait_for(lambda: len(world.worker.registered) > 1, "the worker is back")
    world.client = keep(type(world.client)(world.cache))
    wait_for(lambda: world.use(1) or any(world.client.match(text) for text in PROMPTS), "something new is cached")
    wait_for(lambda: agrees(world, ingest), "every prefix is found, and none of before")
