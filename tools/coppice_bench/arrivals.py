"""Requests as they arrived at a chat service: from a trace in Mooncake's format, or made up with the same statistics.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 tokens of the prompt]}

Equal ids mean equal prompts up to there. Source of the format and of the statistics: kvcache-ai/Mooncake,
`FAST25-release/traces/conversation_trace.jsonl` (lengths: median 6,909 in and 350 out, mean 12,035 and 343; 3.4
arrivals a second; about a third of all blocks were seen before).
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from coppice.errors import UsageError

TRACE_BLOCK_TOKENS = 512
_MEDIAN_INPUT, _INPUT_SPREAD, _INPUT_MAX = 6_900, 1.3, 120_000
_MEDIAN_OUTPUT, _OUTPUT_SPREAD, _OUTPUT_MAX = 320, 0.6, 2_000
_MEAN_GAP_MS = 294
_CONTINUES_SHARE = 0.4  # of the requests: next turn of an earlier one
_REMEMBERED = 200  # conversations that may go on
_HASH_IDS_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def prompt(self) -> bytes:
        """Packed tokens: each hash id stands for its own run of 512."""
        starts = (np.array(self.hash_ids, dtype=np.uint32) + 1) * TRACE_BLOCK_TOKENS
        runs = starts[:, None] + np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint32)
        return runs.astype("<u4").ravel()[: self.input_tokens].tobytes()


def read_arrivals(path: Path, limit: int) -> list[Arrival]:
    """The first `limit` requests; plain or gzip. Raises UsageError that names the line."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            found = [_parse(line, f"{path}:{number}") for number, line in zip(range(1, limit + 1), lines, strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path} cannot be read: {error}", hint="a JSON-lines file, plain or gzip") from error
    if not found:
        raise UsageError(f"--trace {path} has no requests")
    return sorted(found, key=lambda arrival: arrival.at_ms)


def _parse(line: str, where: str) -> Arrival:
    hint = "a line of Mooncake's format has timestamp, input_length, output_length and hash_ids"
    try:
        fields: dict[str, Any] = json.loads(line)
        arrival = Arrival(
            int(fields["timestamp"]),
            int(fields["input_length"]),
            int(fields["output_length"]),
            tuple(int(number) for number in fields["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{where}: not a request: {error!r}", hint=hint) from error
    if arrival.input_tokens < 1 or arrival.output_tokens < 1:
        raise UsageError(f"{where}: lengths must be positive", hint=hint)
    if len(arrival.hash_ids) != ceil(arrival.input_tokens / TRACE_BLOCK_TOKENS):
        ids = len(arrival.hash_ids)
        raise UsageError(f"{where}: {ids} hash_ids for {arrival.input_tokens} tokens in blocks of 512", hint=hint)
    if not all(0 <= number < _HASH_IDS_MAX for number in arrival.hash_ids):
        raise UsageError(f"{where}: a hash id lies outside 0 to {_HASH_IDS_MAX - 1}", hint=hint)
    return arrival


def make_arrivals(count: int, seed: int) -> list[Arrival]:
    """Conversations that go on, lengths and rate as in the trace."""
    return list(_made(count, random.Random(seed)))


def _made(count: int, source: random.Random) -> Iterator[Arrival]:
    next_id, at_ms = 1, 0.0
    histories: list[tuple[int, ...]] = []
    for _ in range(count):
        at_ms += source.expovariate(1 / _MEAN_GAP_MS)
        length = min(_INPUT_MAX, max(16, int(_MEDIAN_INPUT * source.lognormvariate(0, _INPUT_SPREAD))))
        output = min(_OUTPUT_MAX, max(1, int(_MEDIAN_OUTPUT * source.lognormvariate(0, _OUTPUT_SPREAD))))
        known: tuple[int, ...] = (0,)  # the system prompt that all have in common
        if histories and source.random() < _CONTINUES_SHARE:
            known = source.choice(histories)
            length = min(_INPUT_MAX, len(known) * TRACE_BLOCK_TOKENS + max(16, length // 8))
        blocks = ceil(length / TRACE_BLOCK_TOKENS)
        fresh = max(0, blocks - len(known))
        ids = (*known, *range(next_id, next_id + fresh))[:blocks]
        next_id += fresh
        histories = [*histories[1 - _REMEMBERED :], ids[: length // TRACE_BLOCK_TOKENS] or known]
        yield Arrival(int(at_ms), length, output, ids)
