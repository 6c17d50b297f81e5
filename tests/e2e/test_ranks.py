"""A stack whose worker is several processes: exact, and served again after a rank hung."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import test_host_tier as host_tier
from tests.e2e.stack import Stack
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

LENGTHS = (1, 16, 40, 41, 200, 333)
STEP_TIMEOUT_S = 5


@pytest.fixture
def stack(checkpoint: Path, tmp_path: Path) -> Iterator[Stack]:
    shared_out = ["--tensor-parallel=2", f"--step-timeout-s={STEP_TIMEOUT_S}"]
    quick = ["--session-ttl-ms=2000", "--worker-ttl-ms=2000"]
    with Stack(checkpoint, tmp_path, num_blocks=128, worker_args=shared_out, cache_args=quick) as stack:
        yield stack


def check_exact(stack: Stack, oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: stack.complete(prompt, 20)["choices"][0]["token_ids"], prompts)
        for prompt, tokens in zip(prompts, answers, strict=True):
            oracle.check(prompt, tokens)


@pytest.mark.wide
def test_it_says_what_transformers_says(stack: Stack, oracle: Oracle) -> None:
    check_exact(stack, oracle, 1)


@pytest.mark.long
def test_a_rank_that_hangs_ends_its_worker_and_the_next_one_serves(stack: Stack, oracle: Oracle) -> None:
    worker = stack.services["worker-0"]
    assert worker.process is not None
    rank = int(Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text())
    os.kill(rank, signal.SIGSTOP)
    waiting = threading.Thread(target=lambda: stack.post("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3]}))
    waiting.start()
    assert worker.process.wait(60) == 1
    assert re.search(rf"CRITICAL .*rank 1 \(process {rank}\) did not do its share", worker.log.read_text())
    wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank that hung")
    worker.start()
    waiting.join(60)
    stack.wait_ready()
    check_exact(stack, oracle, 2)


@pytest.mark.long
def test_what_the_device_forgot_comes_back_to_every_rank(checkpoint: Path, tmp_path: Path, oracle: Oracle) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(host_tier.TENANTS)
    worker = ["--host-memory-mib=64", "--tensor-parallel=2"]
    num_blocks, cache = host_tier.NUM_BLOCKS, host_tier.CACHE
    with Stack(
        checkpoint, tmp_path, num_blocks=num_blocks, tenants=tenants, cache_args=cache, worker_args=worker
    ) as stack:
        host_tier.go_round(stack, oracle)
