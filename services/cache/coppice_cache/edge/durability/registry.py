"""What Redis is told, for people and for the next start: the workers, and the cache epoch. Never what is decided by.

A thread of its own talks to Redis; when Redis hangs or is gone, that thread waits and readiness says degraded.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from coppice.errors import UsageError
from coppice.messages.index import WorkerInfo, Workers
from coppice_cache.edge.durability.epochs import EpochInRedis

_log = logging.getLogger("coppice.cache")
WORKERS_KEY = "coppice:workers"  # hash: worker id -> JSON
REFRESH_S = 2.0
TTL_S = 10
TIMEOUT_S = 0.5


def connect(url: str, password: str = "") -> redis.Redis:
    """A client; nothing is sent yet. One without a password says none. Raises UsageError for a malformed URL."""
    try:
        return redis.Redis.from_url(
            url,
            password=password or None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
    except (ValueError, redis.RedisError) as error:
        raise UsageError(f"--redis-url: {error}", hint="such as redis://127.0.0.1:6379/0") from error


class Registry:
    """Refreshes Redis every REFRESH_S from `list_workers`."""

    def __init__(self, client: redis.Redis, epoch: EpochInRedis, list_workers: Callable[[], Workers]) -> None:
        self._client = client
        self._epoch = epoch
        self._list_workers = list_workers
        self._stopping = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="redis registry", daemon=True)

    @property
    def problem(self) -> str:
        """Why Redis is of no use at the moment; empty when it is."""
        return self._problem

    def start(self) -> None:
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=2 * TIMEOUT_S + 1)
        self._client.close()

    def refresh(self) -> None:
        """Once, now. Blocks for two timeouts at most."""
        workers = self._list_workers()
        try:
            self._epoch.raise_to(workers.cache_epoch)
            pipeline = self._client.pipeline(transaction=True)
            pipeline.delete(WORKERS_KEY)
            if workers.workers:
                pipeline.hset(WORKERS_KEY, mapping={info.worker_id: _described(info) for info in workers.workers})
                pipeline.expire(WORKERS_KEY, TTL_S)
            pipeline.execute()
        except (redis.RedisError, OSError) as error:
            if not self._problem:
                _log.warning("Redis is not reachable: %s; serving goes on without it", error)
            self._problem = f"redis is not reachable: {error}"
            return
        if self._problem:
            _log.info("Redis is back")
        self._problem = ""

    def _run(self) -> None:
        while not self._stopping.wait(REFRESH_S):
            self.refresh()


def _described(info: WorkerInfo) -> str:
    return json.dumps(
        {
            "worker_epoch": info.worker_epoch,
            "address": info.address,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "model": info.model,
            "open": info.open,
        }
    )
