"""What the device had to forget comes back from the host: found, right, and after crashes too; nothing strict goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.tenants.keys import digest_of_key
from tests.e2e.stack import Stack
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

BLOCK = 16
NUM_BLOCKS = 64  # three quarters of them for the tenant that is not strict: six prompts
PROMPT_BLOCKS = 8
CACHE = ["--session-ttl-ms=2000", "--worker-ttl-ms=2000", "--demote-below-share=1", "--prefill-us-per-token=1000"]
TENANTS = f"""
tenants:
  - {{id: open, api_key_sha256: {digest_of_key("open-key")}}}
  - {{id: closed, api_key_sha256: {digest_of_key("closed-key")}, mode: strict, guarantee_share: 0.25}}
"""


def prompt_of(number: int) -> list[int]:
    """Eight whole blocks and a token."""
    return [(7 * at + 31 * number) % 251 for at in range(PROMPT_BLOCKS * BLOCK + 1)]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tiered")
    tenants = folder / "tenants.yaml"
    tenants.write_text(TENANTS)
    worker = ["--host-memory-mib=64"]
    with Stack(
        checkpoint, folder, num_blocks=NUM_BLOCKS, tenants=tenants, cache_args=CACHE, worker_args=worker
    ) as stack:
        yield stack


@pytest.fixture
def tiered(running: Stack) -> Stack:
    """With nothing cached."""
    running.forget()
    wait_for(lambda: host_cached(running) == 0, "what the host has to be forgotten")
    return running


def copied_blocks(stack: Stack, direction: str) -> float:
    _, text = stack.get(f"http://127.0.0.1:{stack.worker_http[0]}/metrics")
    name = f'coppice_worker_copied_blocks_total{{direction="{direction}"}}'
    return sum(float(line.split()[-1]) for line in str(text).splitlines() if line.startswith(name))


def host_cached(stack: Stack) -> int:
    return sum(worker["host_cached_blocks"] for worker in stack.cache_stats()["workers"])


def ask(stack: Stack, oracle: Oracle, number: int, key: str = "open-key") -> int:
    """Cached tokens of one more request; its answer is right."""
    body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    status, answer = stack.post("/v1/completions", {**body, "return_token_ids": True}, key)
    assert status == 200, answer
    oracle.check(prompt_of(number), answer["choices"][0]["token_ids"])
    stack.wait_at_rest()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def go_round(stack: Stack, oracle: Oracle) -> None:
    """Twice what the device holds, with time to copy; then what it forgot is found again all the same."""
    for count in range(1, 13):
        ask(stack, oracle, count)
        expected = PROMPT_BLOCKS * count
        wait_for(lambda wanted=expected: host_cached(stack) == wanted, f"{expected} blocks on the host")  # type: ignore[misc]
    promoted = copied_blocks(stack, "promote")
    assert [ask(stack, oracle, count) for count in range(1, 5)] == [PROMPT_BLOCKS * BLOCK] * 4
    assert copied_blocks(stack, "promote") - promoted >= 2 * PROMPT_BLOCKS


def open_again(stack: Stack) -> None:
    def is_open() -> bool:
        status, stats = stack.get(f"http://127.0.0.1:{stack.cache_http}/v1/stats")
        return status == 200 and [worker["open"] for worker in stats["workers"]] == [True]

    wait_for(is_open, "the worker to open")
    stack.wait_ready()


def test_what_the_device_forgot_comes_back(tiered: Stack, oracle: Oracle) -> None:
    go_round(tiered, oracle)


def test_nothing_of_a_strict_tenant_is_ever_on_the_host(tiered: Stack, oracle: Oracle) -> None:
    """While another's prompt that came later goes there."""
    before, cached = host_cached(tiered), tiered.cache_stats()["cached_blocks"]
    assert [ask(tiered, oracle, 50, "closed-key") for _ in range(2)] == [0, PROMPT_BLOCKS * BLOCK]
    assert tiered.cache_stats()["cached_blocks"] >= min(cached + PROMPT_BLOCKS, NUM_BLOCKS - PROMPT_BLOCKS)
    ask(tiered, oracle, 51)
    wait_for(lambda: host_cached(tiered) > before, "a demotion")
    assert host_cached(tiered) == before + PROMPT_BLOCKS


@pytest.mark.parametrize("name", ["cache", pytest.param("worker-0", marks=pytest.mark.wide)])
def test_after_a_crash_the_host_tier_fills_again(tiered: Stack, oracle: Oracle, name: str) -> None:
    """What it had is not found any more, and nothing of it is taken for something else."""
    tiered.services[name].kill()
    tiered.services[name].start()
    open_again(tiered)
    assert host_cached(tiered) == 0
    go_round(tiered, oracle)
