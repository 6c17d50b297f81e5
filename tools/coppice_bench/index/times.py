"""In-core times of `coppice bench index`: match, acquire and publish by length of the prompt, eviction by leaves."""

from __future__ import annotations

import gc
import random
from time import perf_counter_ns
from typing import Any

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Acquire, Publish
from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.index.pauses import Pauses
from coppice_bench.index.shape import BLOCK_BYTES, BLOCK_SIZE, Shape, leaf_tokens, random_tokens
from coppice_bench.index.tree_level import TreeLevel
from coppice_bench.report import note
from coppice_bench.timing import time_in_turns, time_one

_CHUNK_TOKENS = 2_048  # of prefill: a long prompt is published in such pieces, so it lies on several nodes
_PROMPTS_TOKENS = 1 << 19  # about this many tokens of each length are cached to be asked for
_PROMPTS_MAX = 64
_LEAVES_SPARE = 4_096  # blocks beyond the leaves
_EVICTIONS = 256
_STEPS_PER_TICK = 2_000  # about a tenth of a second of a busy service


def times_by_length(lengths: tuple[int, ...], shape: Shape, rounds: int) -> dict[str, dict[int, float]]:
    """Medians in µs by operation and tokens, in a tree that holds the sequences of `shape` as well."""
    source = random.Random(5)
    counts = {length: min(_PROMPTS_MAX, max(4, _PROMPTS_TOKENS // length)) for length in lengths}
    asked_tokens = sum(length * count for length, count in counts.items())
    own_tokens = shape.num_sequences * (shape.sequence_tokens - shape.prefix_tokens)
    shared_tokens = shape.num_prefixes * shape.prefix_tokens
    num_blocks = (asked_tokens + own_tokens + shared_tokens) // BLOCK_SIZE + 4 * max(lengths) // BLOCK_SIZE
    driver = CoreDriver(num_blocks, BLOCK_SIZE)
    note(f"filling a tree with {shape.num_sequences} sequences")
    for sequence in shape.sequences():
        driver.cache(sequence)
    table: dict[str, dict[int, float]] = {}
    for length in lengths:
        note(f"prompts of {length} tokens")
        prompts = [random_tokens(source, length) for _ in range(counts[length])]
        for prompt in prompts:
            _cache_in_chunks(driver, prompt)
        gc.collect()
        gc.freeze()
        for name, time_us in _times_of(driver, prompts, max(16, rounds * lengths[0] // length)).items():
            table.setdefault(name, {})[length] = time_us
    gc.unfreeze()
    return table


def _times_of(driver: CoreDriver, prompts: list[bytes], rounds: int) -> dict[str, float]:
    """Of prompts of one length that are cached, and of fresh ones of that length. A last block is never matched."""
    source = random.Random(6)
    asked = [prompt + bytes(BLOCK_BYTES) for prompt in prompts]
    count, num_tokens = len(prompts), len(prompts[0]) // TOKEN_BYTES
    if driver.match(asked[0]) != num_tokens:
        raise AssertionError(f"a cached prompt of {num_tokens} tokens matches {driver.match(asked[0])}")
    level = TreeLevel(driver)
    times = time_in_turns(
        {
            "match_us": lambda number: driver.match(asked[number % count]),
            "match_and_pin_us": lambda number: level.lookup(asked[number % count]),
        },
        max(rounds, 64),
    )
    warm, cold, publish = [], [], []
    for number in range(rounds):
        warm.append(_timed_acquire(driver, driver.acquire_op(asked[number % count])))
        fresh = random_tokens(source, num_tokens)
        op = driver.acquire_op(fresh)
        cold.append(_timed_acquire(driver, op, keep=True))
        began = perf_counter_ns()
        driver.do(Publish(op.lease_id, 0, fresh))
        publish.append(perf_counter_ns() - began)
        driver.release(op.lease_id)
    medians = {"acquire_us": warm, "acquire_cold_us": cold, "publish_us": publish}
    return times | {name: sorted(taken)[len(taken) // 2] / 1_000 for name, taken in medians.items()}


def _timed_acquire(driver: CoreDriver, op: Acquire, *, keep: bool = False) -> int:
    """Nanoseconds. The lease ends at once unless it is kept."""
    began = perf_counter_ns()
    driver.do(op)
    taken_ns = perf_counter_ns() - began
    if not keep:
        driver.release(op.lease_id)
    return taken_ns


def _cache_in_chunks(driver: CoreDriver, prompt: bytes) -> None:
    """As a prefill in chunks does it: each is published once its step has completed."""
    lease_id = driver.acquire(prompt)
    chunk_bytes = _CHUNK_TOKENS * TOKEN_BYTES
    for start in range(0, len(prompt), chunk_bytes):
        driver.do(Publish(lease_id, start // BLOCK_BYTES, prompt[start : start + chunk_bytes]))
    driver.release(lease_id)


def times_by_leaves(leaves: tuple[int, ...]) -> tuple[dict[int, float], dict[str, Any]]:
    """Median µs of one eviction by number of leaves of one block, and the longest pauses while that many are used."""
    driver = CoreDriver(leaves[-1] + _LEAVES_SPARE, BLOCK_SIZE)
    pauses = Pauses(driver)
    evict_us: dict[int, float] = {}
    grown = 0
    with pauses:
        for number in leaves:
            note(f"{number} leaves")
            for leaf in range(grown, number):
                pauses.cache(leaf_tokens(leaf + 1))
                if leaf % _STEPS_PER_TICK == 0:
                    pauses.tick()
            grown = number
            level = TreeLevel(driver)
            evict_us[number] = time_one(level.evict_one, min(_EVICTIONS, number // 4))
        note("pauses")
        return evict_us, pauses.report()
