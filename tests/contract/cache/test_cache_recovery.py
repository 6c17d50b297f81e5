"""A service that is restarted with its log in Redis, or without it: what is cached comes back, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from coppice_cache.edge.durability import recovery_log
from tests.fakes.cache.cache_ends import SEAL_KEY, Cache, FakeWorker, UnaryClient, prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
TTL_MS = 3_000  # of the clients of before, for which a restarted service waits


@pytest.fixture(autouse=True)
def _hurry(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_log, "IDLE_S", 0.05)
    monkeypatch.setattr(recovery_log, "RETRY_S", 0.1)


def fill(cache: Cache, worker: FakeWorker, keep: Keep) -> None:
    """Four blocks of a prompt are cached, and the worker knows their seals."""
    client = keep(UnaryClient(cache))
    grant = client.acquire(1, prompt(17)).grant
    worker.attach(grant.owned)
    published = client.publish(1, prompt(16)).published
    assert published.num_published_blocks == 4
    worker.seal(published.handles, published.seals)
    client.release(1)


def metrics(cache: Cache) -> str:
    return str(cache.rest("/metrics")[1])


def all_written(cache: Cache) -> bool:
    text = metrics(cache)
    return "coppice_cache_recovery_log_lag_events 0.0" in text and "coppice_cache_recovery_log_age_seconds" in text


def restarted(cache: Cache, worker: FakeWorker) -> None:
    """The worker opens in the new incarnation."""
    cache.restart()
    worker.wait_registered(2)
    wait_for(lambda: cache.stats()["workers"][0]["open"], "the window to close")


def test_what_was_cached_is_found_after_a_restart(valkey: str, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    restarted(cache, worker)
    assert keep(UnaryClient(cache)).match(prompt(17)) == 16
    cache.audit()
    text = metrics(cache)
    assert 'coppice_cache_replay_blocks_total{outcome="replayed"} 4.0' in text
    restarted_again = wait_for(lambda: all_written(cache), "a snapshot of the new incarnation")
    assert restarted_again
    cache.restart()
    worker.wait_registered(3)
    wait_for(lambda: keep(UnaryClient(cache)).match(prompt(17)) == 16, "the second incarnation's own log")


@pytest.mark.wide
def test_what_was_cached_outlives_a_change_of_the_seal_key(valkey: str, keep: Keep) -> None:
    """Twice: the first key is needed for one start alone."""
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    first, second = "ab" * 32, "cd" * 32
    for number, keys in enumerate((f"{first},{SEAL_KEY}", f"{second},{first}", second), start=2):
        cache.restart(seal_key=SecretStr(keys))
        worker.wait_registered(number)
        wait_for(lambda: keep(UnaryClient(cache)).match(prompt(17)) == 16, "what was cached under the key of before")
        wait_for(lambda: all_written(cache), "a snapshot under the new key")
    assert worker.epoch >> 32 == 1, "its pool was never taken for a new one"


@pytest.mark.wide
def test_a_crash_at_any_time_leaves_a_log(valkey: str, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written when the process is told to stop: what is there then is all there is."""
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    wait_for(lambda: all_written(cache), "the log")
    monkeypatch.setattr(cache.process._recovery._writer, "follow", lambda timeout_s: None)
    restarted(cache, worker)
    assert keep(UnaryClient(cache)).match(prompt(17)) == 16


@pytest.mark.wide
def test_with_redis_flushed_nothing_is_found_and_all_goes_on(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    assert cache.process._recovery is not None
    cache.process._recovery.stop()
    client.flushall()
    restarted(cache, worker)
    assert keep(UnaryClient(cache)).match(prompt(17)) == 0
    cache.audit()
    wait_for(lambda: client.keys("coppice:index:*"), "a fresh log")


@pytest.mark.wide
def test_what_the_worker_lost_is_not_found(valkey: str, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    worker.generations[1] += 1
    worker.seals[1] = 0
    restarted(cache, worker)
    assert keep(UnaryClient(cache)).match(prompt(17)) == 4


def test_without_a_seal_key_there_is_no_log(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS, seal_key=""))
    worker = keep(FakeWorker(cache)).wait_registered()
    fill(cache, worker, keep)
    assert "recovery_log" not in metrics(cache)
    cache.restart()
    assert not client.keys("coppice:index:*")


@pytest.mark.wide
def test_a_redis_that_is_of_no_use_degrades_and_nothing_else(valkey: str, client: redis.Redis, keep: Keep) -> None:
    cache = keep(Cache(redis_url=valkey, session_ttl_ms=TTL_MS))
    worker = keep(FakeWorker(cache)).wait_registered()
    wait_for(lambda: client.keys("coppice:index:*"), "the log")
    for key in client.keys("coppice:index:*"):
        client.set(key, "not a list")
    fill(cache, worker, keep)

    def reasons() -> str:
        return " ".join(cache.rest("/readyz")[1]["reasons"])

    wait_for(lambda: all_written(cache), "a fresh snapshot")
    wait_for(lambda: not reasons(), "no reasons left")
    restarted(cache, worker)
    assert keep(UnaryClient(cache)).match(prompt(17)) == 16
