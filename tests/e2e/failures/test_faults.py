"""kill -9 of each service in turn under load: what DESIGN section 8 says, and the stack serves again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

NUM_CLIENTS = 4
NEW_PREFIX = 4  # prompts that share one


class Load:
    """Clients that ask again and again until stopped; every answer is kept and later compared with the oracle.

    With `num_prompts`, each client asks for so many and then for the same again: what is cached does not grow any more.
    It has to be a multiple of `NEW_PREFIX`: the second round begins with a prefix, as the first did.
    """

    def __init__(self, stack: Stack, num_prompts: int | None = None) -> None:
        self._stack = stack
        self._num_prompts = num_prompts
        self._stopping = threading.Event()
        self.served: list[tuple[list[int], list[int]]] = []
        self.failed: list[tuple[int, Any]] = []
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, index: int) -> None:
        for turn in count():
            if self._stopping.is_set():
                return
            if turn == 0 or (self._num_prompts and turn % self._num_prompts == 0):
                rng = random.Random(index)
            if turn % NEW_PREFIX == 0:  # a prefix that is new prefers no worker
                common = [rng.randrange(256) for _ in range(64)]
            prompt = common + [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            status, answer = self._stack.post("/v1/completions", body)
            if status == 200:
                self.served.append((prompt, answer["choices"][0]["token_ids"]))
            else:
                self.failed.append((status, answer))
                self._stopping.wait(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request never ended"


TTL = ["--session-ttl-ms=2000", "--worker-ttl-ms=2000"]


@pytest.fixture(scope="module")
def one_worker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(checkpoint, tmp_path_factory.mktemp("one"), num_blocks=128, cache_args=TTL) as stack:
        yield stack


@pytest.fixture(scope="module")
def two_workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("two")
    with Stack(checkpoint, folder, num_blocks=128, num_workers=2, cache_args=TTL) as stack:
        yield stack


@pytest.fixture
def stack(one_worker: Stack) -> Stack:
    one_worker.restore()
    return one_worker


@pytest.fixture
def pair(two_workers: Stack) -> Stack:
    """Of workers."""
    two_workers.restore()
    return two_workers


def check(stack: Stack, load: Load, oracle: Oracle) -> None:
    """Everything that was served is right, the stack serves again, and nothing is left behind."""
    for prompt, tokens in load.served:
        oracle.check(prompt, tokens)
    prompt = list(range(50))
    oracle.check(prompt, stack.complete(prompt, 10)["choices"][0]["token_ids"])
    stack.wait_at_rest()


def wait_served(load: Load, more: int) -> None:
    target = len(load.served) + more
    wait_for(lambda: len(load.served) >= target, f"{more} more requests to be served")


def test_the_cache_service_dies(stack: Stack, oracle: Oracle) -> None:
    with Load(stack) as load:
        wait_served(load, 6)
        stack.services["cache"].kill()
        stack.services["cache"].start()
        wait_served(load, 12)
        load.stop()
        assert not load.failed, "a request failed though only the cache service died"
        check(stack, load, oracle)


def test_a_worker_dies(stack: Stack, oracle: Oracle) -> None:
    with Load(stack) as load:
        wait_served(load, 6)
        stack.services["worker-0"].kill()
        stack.services["worker-0"].start()
        wait_served(load, 12)
        load.stop()
        assert not load.failed, "a request failed though only its worker died, which came back"
        check(stack, load, oracle)


def test_the_scheduler_dies(stack: Stack, oracle: Oracle) -> None:
    with Load(stack) as load:
        wait_served(load, 6)
        stack.services["scheduler"].kill()
        stack.services["scheduler"].start()
        stack.wait_ready()
        wait_served(load, 12)
        load.stop()
        assert {status for status, _ in load.failed} <= {0, 503}, load.failed
        wait_for(lambda: stack.cache_stats()["sessions"] == 1, "the dead scheduler's session to expire")
        check(stack, load, oracle)


def computed(stack: Stack, index: int) -> float:
    return stack.metric(stack.worker_http[index], "coppice_worker_tokens_computed_total")


def wait_both_chosen(pair: Stack) -> None:
    before = [computed(pair, index) for index in (0, 1)]
    wait_for(lambda: all(computed(pair, index) > before[index] for index in (0, 1)), "each worker to be chosen")


@pytest.mark.wide
def test_one_of_two_workers_dies_and_the_other_serves(pair: Stack, oracle: Oracle) -> None:
    with Load(pair) as load:
        wait_both_chosen(pair)
        wait_served(load, 16)
        pair.services["worker-1"].kill()
        wait_served(load, 16)
        load.stop()
    assert not load.failed, "a request failed though only its worker died"
    pair.services["worker-1"].start()
    ready = f"http://127.0.0.1:{pair.worker_http[1]}/readyz"
    wait_for(lambda: pair.get(ready)[0] == 200, "the worker to be back")
    check(pair, load, oracle)


@pytest.mark.wide
def test_a_drained_worker_leaves_without_a_loss(pair: Stack, oracle: Oracle) -> None:
    with Load(pair) as load:
        wait_both_chosen(pair)
        wait_served(load, 16)
        with grpc.insecure_channel(f"127.0.0.1:{pair.worker_grpc[1]}") as channel:
            worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=60)
        before = computed(pair, 1)
        wait_served(load, 8)
        assert computed(pair, 1) == before
        assert pair.services["worker-1"].stop() == 0
        wait_served(load, 8)
        load.stop()
    assert not load.failed
    check(pair, load, oracle)
