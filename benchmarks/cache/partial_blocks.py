"""What copying the beginnings of blocks brings, by block size: the cached share of prompts, without and with it.

    python -m benchmarks.cache.partial_blocks [--requests 4000] [--json]

Counts of the cache service's core, no times: the same on every machine. Loads, from a seed:

    chat       conversations of several turns below twelve system prompts of 30 to 1,200 tokens
    documents  a system prompt, one of 60 documents of 200 to 3,000 tokens, and a question about it
    templates  one of 20 beginnings of 100 to 400 tokens, and what follows it

Every request shares what is cached, computes the rest and an answer, and publishes its full blocks. All sizes have the
same memory. `cached` is the share of prompt tokens that need no computing; `copied` that part of it which was copied.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Grant
from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.index.shape import random_tokens
from coppice_bench.report import describe_run, note, print_report

MEMORY_TOKENS = 131_072
BLOCK_SIZES = (16, 64, 128)
SEED = 1
Load = Iterator[tuple[bytes, bytes]]  # prompt and answer


def chat(source: random.Random, requests: int) -> Load:
    systems = [random_tokens(source, source.randint(30, 1200)) for _ in range(12)]
    open_ones: list[bytes] = []
    for _ in range(requests):
        goes_on = open_ones and source.random() < 0.7
        history = open_ones.pop(source.randrange(len(open_ones))) if goes_on else source.choice(systems)
        prompt = history + random_tokens(source, source.randint(10, 80))
        answer = random_tokens(source, source.randint(20, 250))
        yield prompt, answer
        if len(prompt) < 6_000 * TOKEN_BYTES:
            open_ones.append(prompt + answer)
        del open_ones[:-40]


def documents(source: random.Random, requests: int) -> Load:
    system = random_tokens(source, 150)
    texts = [random_tokens(source, source.randint(200, 3000)) for _ in range(60)]
    for _ in range(requests):
        prompt = system + source.choice(texts) + random_tokens(source, source.randint(10, 60))
        yield prompt, random_tokens(source, source.randint(20, 200))


def templates(source: random.Random, requests: int) -> Load:
    heads = [random_tokens(source, source.randint(100, 400)) for _ in range(20)]
    for _ in range(requests):
        prompt = source.choice(heads) + random_tokens(source, source.randint(30, 120))
        yield prompt, random_tokens(source, source.randint(5, 60))


LOADS: dict[str, Callable[[random.Random, int], Load]] = {"chat": chat, "documents": documents, "templates": templates}


@dataclass(slots=True)
class Counts:
    prompt: int = 0
    shared: int = 0
    copied: int = 0

    def shares(self) -> dict[str, float]:
        return {
            "cached": round((self.shared + self.copied) / self.prompt, 4),
            "copied": round(self.copied / self.prompt, 4),
        }


def replay(load: Load, block_size: int, *, copies: bool) -> Counts:
    driver, counts = CoreDriver(MEMORY_TOKENS // block_size, block_size), Counts()
    for prompt, answer in load:
        num_prompt = len(prompt) // TOKEN_BYTES
        whole = prompt + answer[:-TOKEN_BYTES]  # the last token has no KV
        op = replace(driver.acquire_op(prompt, len(whole) // TOKEN_BYTES), wants_copy=copies)
        grant = driver.do(op)
        assert isinstance(grant, Grant), grant
        counts.prompt += num_prompt
        counts.shared += grant.num_cached_tokens
        counts.copied += grant.num_copy_tokens
        driver.publish(op.lease_id, whole)
        driver.release(op.lease_id)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4_000, help="of each load")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name, load in LOADS.items():
        found[name] = {}
        for block_size in BLOCK_SIZES:
            note(f"{name}, blocks of {block_size}")
            without, with_copies = (
                replay(load(random.Random(SEED), arguments.requests), block_size, copies=copies)
                for copies in (False, True)
            )
            found[name][block_size] = {"without": without.shares()["cached"], **with_copies.shares()}
    sizes = {"requests": arguments.requests, "memory_tokens": MEMORY_TOKENS}
    print_report({"bench": "partial_blocks", **found, **sizes, **describe_run()}, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
