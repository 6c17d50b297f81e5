"""The recovery log against a real server: snapshots, what follows them, and a Redis that misbehaves."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from coppice.handles import HANDLE_BYTES
from coppice.ids import CacheEpoch, DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored
from coppice_cache.edge.durability import log_store, recovery_log
from coppice_cache.edge.durability.log_codec import LogKeys
from coppice_cache.edge.durability.log_store import HEAD_KEY, LoadedLog, LogStream, connect_log, load
from coppice_cache.edge.durability.recovery_log import LONG_RETRY_S, RETRY_S, RecoveryLog, Slice
from coppice_cache.edge.service.event_hub import EventHub
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for

KEYS = LogKeys.derive(b"key of the log, 32 bytes of them")
WORKER, EPOCH = WorkerId("w0"), WorkerEpoch(3 << 32 | 1)
CONTEXT = (WORKER, EPOCH, DomainId("amber"), Namespace(b"model-a"))
CANARY = b"every owl hoots at dusk!"


def stored(number: int) -> Stored:
    handle, seal = number.to_bytes(HANDLE_BYTES, "little"), number.to_bytes(SEAL_BYTES, "little")
    return Stored(*CONTEXT, b"", CANARY + number.to_bytes(8, "little"), handle, seal)


def removed(number: int) -> Removed:
    return Removed(*CONTEXT, stored(number).handles, stored(number).seals)


class Index:
    """A plain set of blocks that tells the hub of its changes, as the service does."""

    def __init__(self, *numbers: int, cache_epoch: int = 3) -> None:
        self.cache_epoch = CacheEpoch(cache_epoch)
        self.is_replaying = False
        self.hub = EventHub(1, events_max=64)
        self.found = set(numbers)
        self.between_slices: list[Any] = []

    def store(self, *numbers: int) -> None:
        self.found.update(numbers)
        self.hub.publish([stored(number) for number in numbers])

    def remove(self, *numbers: int) -> None:
        self.found.difference_update(numbers)
        self.hub.publish([removed(number) for number in numbers])

    def snapshot_slice(self, cursor: Any, max_blocks: int) -> Slice:
        if cursor is None:
            cursor = 0
        elif self.between_slices:
            self.between_slices.pop(0)()
        at = sorted(number for number in self.found if number >= cursor)
        rest = at[2:]
        events = tuple(stored(number) for number in at[:2])
        return Slice(events, self.hub.position, rest[0] if rest else None)


def blocks(loaded: LoadedLog) -> set[int]:
    """What a reader of the log ends with."""
    found: set[int] = set()
    for event in loaded.by_worker.get(WORKER, []):
        if isinstance(event, Cleared):
            found.clear()
            continue
        number = int.from_bytes(event.handles, "little")
        if isinstance(event, Stored):
            assert event == stored(number)
            found.add(number)
        else:
            found.discard(number)
    return found


@pytest.fixture(autouse=True)
def _never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_log, "IDLE_S", 0.0)


def writer(client: redis.Redis, index: Index, **options: Any) -> RecoveryLog:
    return RecoveryLog(client, KEYS, index, index.hub, **options)


def streams(client: redis.Redis) -> list[bytes]:
    return [key for key in client.keys("coppice:index:*") if key != HEAD_KEY.encode()]


def test_no_log_is_an_empty_log(client: redis.Redis) -> None:
    assert load(client, KEYS) == LoadedLog()


def test_a_snapshot_and_what_followed(client: redis.Redis) -> None:
    index = Index(1, 2, 3, 4, 5)
    log = writer(client, index)
    assert log.keep() == 0.0
    assert blocks(load(client, KEYS)) == {1, 2, 3, 4, 5}
    index.store(6, 7)
    index.remove(2, 6)
    assert log.status().lag_events == 4
    assert log.keep() == 0.0
    assert log.status().lag_events == 0
    loaded = load(client, KEYS)
    assert blocks(loaded) == index.found == {1, 3, 4, 5, 7}
    assert (loaded.num_blocks, loaded.problem) == (7, "")


def test_changes_between_the_slices_of_a_snapshot_are_not_lost(client: redis.Redis) -> None:
    index = Index(1, 2, 3, 4, 5, 6)
    index.between_slices = [lambda: index.remove(1, 4), lambda: (index.store(1, 2), index.remove(6))]
    writer(client, index).snapshot()
    assert blocks(load(client, KEYS)) == index.found == {1, 2, 3, 5}


def test_an_empty_index_has_a_log_too(client: redis.Redis) -> None:
    index = Index()
    log = writer(client, index)
    log.keep()
    index.store(1)
    log.keep()
    assert blocks(load(client, KEYS)) == {1}


def test_a_long_stream_is_written_anew_and_the_old_one_deleted(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_log, "GROWTH_BYTES_MIN", 2_000)
    index = Index(1)
    log = writer(client, index)
    log.keep()
    (first,) = streams(client)
    for number in range(2, 40):
        index.store(number)
        index.remove(number)
        log.keep()
    (second,) = streams(client)
    assert second != first
    assert blocks(load(client, KEYS)) == {1}
    assert log.status().num_bytes < 5_000


def test_everything_has_a_time_to_live(client: redis.Redis) -> None:
    LogStream(client, KEYS).append([stored(1)])
    (unfinished,) = streams(client)
    assert 0 < int(client.ttl(unfinished)) <= log_store.UNFINISHED_TTL_S
    writer(client, Index(1)).keep()
    assert all(0 < int(client.ttl(key)) <= log_store.STREAM_TTL_S for key in client.keys("*"))


def test_prompts_and_names_cannot_be_read_in_redis(client: redis.Redis) -> None:
    index = Index(1, 2)
    log = writer(client, index)
    log.keep()
    index.store(3)
    log.keep()
    seen = b"".join(b"".join(client.lrange(key, 0, -1)) + key for key in streams(client)) + client.get(HEAD_KEY)
    assert len(seen) > 100
    for secret in (CANARY, CANARY[:6], CANARY[-6:], b"amber", b"model-a"):
        assert secret not in seen


@pytest.mark.parametrize("how", ["changed", "replaced", "moved"])
def test_a_corrupt_record_ends_what_can_be_used(client: redis.Redis, how: str) -> None:
    index = Index(1, 2)
    log = writer(client, index)
    log.keep()
    for number in (3, 4, 5):
        index.store(number)
        log.keep()
    (key,) = streams(client)
    record = client.lindex(key, 2)
    worse = {"changed": record[:-1] + bytes([record[-1] ^ 1]), "replaced": b"", "moved": client.lindex(key, 3)}
    client.lset(key, 2, worse[how])
    loaded = load(client, KEYS)
    assert blocks(loaded) == {1, 2, 3}
    assert "record 2" in loaded.problem


def test_another_seal_key_reads_nothing(client: redis.Redis) -> None:
    writer(client, Index(1)).keep()
    loaded = load(client, LogKeys.derive(b"x" * 32))
    assert not loaded.by_worker
    assert "another seal key" in loaded.problem


@pytest.mark.parametrize("head", [b"garbage", b"", b"2:zz", b"2:" + b"ab" * 15])
def test_a_head_that_names_nothing(client: redis.Redis, head: bytes) -> None:
    client.set(HEAD_KEY, head)
    loaded = load(client, KEYS)
    assert not loaded.by_worker
    assert loaded.problem
    log = writer(client, Index(1))
    assert log.keep() == 0.0
    assert blocks(load(client, KEYS)) == {1}


def test_wrong_types_are_a_problem_for_the_log_and_nobody_else(client: redis.Redis) -> None:
    client.rpush(HEAD_KEY, "a list")
    assert "WRONGTYPE" in load(client, KEYS).problem
    index = Index(1)
    log = writer(client, index)
    assert log.keep() == 0.0
    (key,) = streams(client)
    client.set(key, "a string")
    assert "WRONGTYPE" in load(client, KEYS).problem
    index.store(2)
    assert log.keep() == RETRY_S
    assert "WRONGTYPE" in log.problem
    assert log.keep() == 0.0
    assert not log.problem
    assert blocks(load(client, KEYS)) == {1, 2}


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_flushed_redis_gets_a_fresh_snapshot(client: redis.Redis, is_busy: bool) -> None:
    index = Index(1, 2, 3)
    log = writer(client, index)
    log.keep()
    client.flushall()
    if is_busy:
        index.store(4)
    assert log.keep() == RETRY_S, "it was noticed"
    assert not client.keys("coppice:index:*"), "nothing is pushed behind what is gone"
    assert log.keep() == 0.0
    assert blocks(load(client, KEYS)) == index.found


def test_a_writer_that_waits_for_events_is_woken_to_stop(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_log, "IDLE_S", 3600.0)
    index = Index(1)
    log = writer(client, index)
    log.start()
    wait_for(lambda: any(one.is_waiting for one in index.hub._subscriptions), "the writer to wait")
    log.stop()
    assert not log._thread.is_alive()


def test_redis_that_dies_and_comes_back(client: redis.Redis) -> None:
    server = valkey_server()
    server.start()
    port = server.port
    index = Index(1)
    log = writer(connect_log(f"redis://127.0.0.1:{port}/0"), index)
    assert log.keep() == 0.0
    server.stop()
    index.store(2)
    assert log.keep() == RETRY_S
    assert "the recovery log is not kept" in log.problem
    assert log.status().snapshot_age_s is not None
    with valkey_server(port=port):
        assert log.keep() == 0.0
        assert not log.problem
        assert blocks(load(connect_log(f"redis://127.0.0.1:{port}/0"), KEYS)) == {1, 2}


def test_nothing_is_read_from_a_redis_that_is_gone() -> None:
    gone = connect_log("redis://127.0.0.1:1/0")
    assert load(gone, KEYS).problem


def test_a_hub_that_forgot_makes_a_fresh_snapshot(client: redis.Redis) -> None:
    index = Index(1)
    log = writer(client, index)
    log.keep()
    for number in range(2, 200):
        index.store(number)
    assert log.keep() == RETRY_S
    assert log.keep() == 0.0
    assert blocks(load(client, KEYS)) == index.found


def test_another_incarnation_in_this_process_makes_a_fresh_snapshot(client: redis.Redis) -> None:
    index = Index(1, 2)
    log = writer(client, index)
    log.keep()
    index.found = {9}
    index.cache_epoch = CacheEpoch(8)
    index.hub.restart(2)
    log.keep()
    log.keep()
    assert blocks(load(client, KEYS)) == {9}
    assert client.get(HEAD_KEY).startswith(b"8:")


def test_an_incarnation_that_is_over_does_not_name_its_log(client: redis.Redis) -> None:
    old_index = Index(1)
    old = writer(client, old_index)
    old.keep()
    writer(client, Index(2, cache_epoch=4)).keep()
    assert old.keep() == RETRY_S, "its stream is gone"
    assert old.keep() == LONG_RETRY_S
    assert "a later incarnation" in old.problem
    assert blocks(load(client, KEYS)) == {2}
    assert len(streams(client)) == 1


def test_an_index_that_does_not_fit_has_no_log(client: redis.Redis) -> None:
    log = writer(client, Index(*range(100)), max_bytes=1_000)
    assert log.keep() == LONG_RETRY_S
    assert "needs more than 1000 bytes" in log.problem
    assert not streams(client)


def test_a_snapshot_that_redis_has_no_room_for_does_not_keep_the_room_that_there_was(client: redis.Redis) -> None:
    index = Index(*range(10))
    index.between_slices.append(lambda: client.config_set("maxmemory", "1"))
    log = writer(client, index)
    try:
        assert log.keep() == LONG_RETRY_S
    finally:
        client.config_set("maxmemory", "0")
    assert "maxmemory" in log.problem
    assert not streams(client)
    assert log.keep() == 0.0
    assert blocks(load(client, KEYS)) == set(range(10))


def test_reading_stops_when_the_time_is_up(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "_RECORDS_PER_PAGE", 1)
    index = Index(1)
    log = writer(client, index)
    log.keep()
    index.store(2)
    log.keep()
    times = iter([0.0, 6.0])
    loaded = load(client, KEYS, now_s=lambda: next(times))
    assert blocks(loaded) == {1}
    assert "too long" in loaded.problem


def test_the_thread_waits_for_the_replay_and_ends_with_what_is_left(client: redis.Redis) -> None:
    index = Index(1)
    index.is_replaying = True
    log = writer(client, index)
    log.start()
    log.stop()
    assert not client.keys("*"), "the log of before may still be needed"
    index.is_replaying = False
    log = writer(client, index)
    log.keep()
    index.store(2)
    log._stopping.set()
    log.run()
    assert blocks(load(client, KEYS)) == {1, 2}


def test_events_are_cut_into_records(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "RECORD_BYTES", 300)
    stream = LogStream(client, KEYS)
    many: list[IndexEvent] = [stored(number) for number in range(50)]
    stream.append(many)
    stream.name(CacheEpoch(1))
    loaded = load(client, KEYS)
    assert loaded.by_worker[WORKER] == many
    assert loaded.num_records > 10
