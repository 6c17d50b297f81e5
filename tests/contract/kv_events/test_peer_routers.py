"""Dynamo's indexer reads our KV events. For who has its wheel unpacked in a folder (benchmarks/README.md) that the
variable COPPICE_PEERS_SITE names; skipped elsewhere, because peers are compared and never depended upon.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice_cache.edge.events.kv_events_zmq import ZmqOut
from tests.contract.kv_events.test_index_followers import World
from tests.contract.kv_events.test_index_ingested import PROMPTS
from tests.fakes.cache.cache_ends import BLOCK
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
SITE = os.environ.get("COPPICE_PEERS_SITE", "")
CALL_S = 60


class DynamoIndexer:
    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--block-size", str(BLOCK)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--threads", "1"], env={**os.environ, "PYTHONPATH": SITE}, stdout=sink, stderr=sink
            )
        wait_for(lambda: self._call("/health") is not None, "the indexer answers", 60)

    def register(self, way: ZmqOut) -> None:
        where = {"endpoint": way.endpoint, "replay_endpoint": way.replay_endpoint}
        assert self._call("/register", {"instance_id": 1, "model_name": "m", "block_size": BLOCK, **where}) is not None

    def cached_tokens(self, packed: bytes) -> int:
        ids = np.frombuffer(packed, dtype="<u4").tolist()
        answer = self._call("/query", {"token_ids": ids, "model_name": "m"})
        assert answer is not None
        return int(json.loads(answer)["scores"].get("1", {}).get("0", 0))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=CALL_S)

    def _call(self, path: str, body: Any = None) -> bytes | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            return None


@pytest.fixture
def dynamo(tmp_path: Path) -> Iterator[DynamoIndexer]:
    if not (Path(SITE) / "dynamo" / "indexer").is_dir() or not SITE:
        pytest.skip("no Dynamo here: COPPICE_PEERS_SITE names no folder with its wheel unpacked")
    started = DynamoIndexer(tmp_path / "dynamo.log")
    yield started
    started.stop()


def test_dynamo_finds_the_prefixes_that_the_service_finds(keep: Keep, dynamo: DynamoIndexer) -> None:
    world = World(keep)
    world.use(12)
    way = world.cache.process.kv_events[0].way
    assert isinstance(way, ZmqOut)
    wait_for(lambda: way.next_sequence, "it comes late, and needs a replay")
    dynamo.register(way)

    def agrees() -> bool:
        found = [dynamo.cached_tokens(text) for text in PROMPTS]
        return found == [world.client.match(text) for text in PROMPTS]

    wait_for(lambda: world.use(1) or agrees(), "its subscription has arrived")
    for _ in range(4):
        world.use(10)
        wait_for(agrees, "every prefix is found, and none that is gone")
    world.invalidate("a")
    wait_for(agrees, "nothing is found any more")
    world.use(10)
    wait_for(agrees, "what came afterwards is found")
    assert any(world.client.match(text) for text in PROMPTS)
