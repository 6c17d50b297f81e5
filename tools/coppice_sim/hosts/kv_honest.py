"""A stand-in for a transformer that is honest about its cache: any wrong read becomes a wrong token.

    slot      (salt of the domain, position, hash of the tokens up to and including it)
    token     hash of everything that was read: all slots 0 .. n-1, each mixed with the place where it stood

So a block that is stale, foreign, half written or in the wrong place changes the next token, and `reference` says from
the tokens alone what the next token is. A new slot also carries on what was wrong with the slots before it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from coppice_worker.core.batch.step_batch import (
    Float32,
    Int32,
    Int64,
    Logprobs,
    PoolSpec,
    PromptTokens,
    SampleRows,
    StepBatch,
    StepOutput,
    UInt64,
)

VOCABULARY = 1_000
_MASK = (1 << 64) - 1
_A, _B, _C = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NOTHING = np.uint64(_A)  # the hash of no tokens


def _mix(values: UInt64) -> UInt64:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_B)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_C)
    return values ^ (values >> np.uint64(31))


def _mix_one(value: int) -> int:
    value = ((value ^ (value >> 30)) * _B) & _MASK
    value = ((value ^ (value >> 27)) * _C) & _MASK
    return value ^ (value >> 31)


def _token_terms(tokens: UInt64, positions: UInt64) -> UInt64:
    """What each token adds to the hash of its prefix."""
    return _mix(tokens * np.uint64(_C) + positions * np.uint64(_A) + np.uint64(1))


def prefix_hashes(tokens: npt.NDArray[np.integer]) -> UInt64:
    """The hash that the slot of each position must hold, shape [N]."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    return np.cumsum(_token_terms(tokens.astype(np.uint64), positions)) + _NOTHING


def _next_token(digest: int, seed: int, position: int, vocabulary: int) -> int:
    return _mix_one((digest ^ _mix_one((seed + position * _A) & _MASK)) & _MASK) % vocabulary


def salt_of_domain(domain: str) -> int:
    return int.from_bytes(blake2b(domain.encode(), digest_size=8).digest(), "little")


def _views(salts: UInt64, places: UInt64, hashes: UInt64) -> UInt64:
    """What reading a slot at a place contributes."""
    return _mix(hashes ^ _mix(salts * np.uint64(_B) + places * np.uint64(_C)))


def reference(prompt: bytes, count: int, *, seed: int, salt: int, vocabulary: int = VOCABULARY) -> list[int]:
    """The next `count` tokens after `prompt` (packed u32), from the tokens alone."""
    known = np.frombuffer(prompt, "<u4").astype(np.uint64)
    hashes = prefix_hashes(known)
    places = np.arange(len(known), dtype=np.uint64)
    digest = int(_views(np.full(len(known), salt, np.uint64), places, hashes).sum(dtype=np.uint64))
    last, output = int(hashes[-1]), []
    for position in range(len(known), len(known) + count):
        token = _next_token(digest, seed, position, vocabulary)
        output.append(token)
        last = (last + _mix_one((token * _C + position * _A + 1) & _MASK)) & _MASK
        digest = (digest + _mix_one(last ^ _mix_one((salt * _B + position * _C) & _MASK))) & _MASK
    return output


def logprobs_of(tokens: Int64, num_top: int) -> Logprobs:
    """Made up, but each token has its own: the chosen one between 0 and -1, the others below it."""
    chosen: Float32 = (-(tokens % VOCABULARY) / VOCABULARY).astype(np.float32)
    places = np.arange(num_top)
    return Logprobs(
        chosen=chosen,
        top_ids=((tokens[:, None] + places) % VOCABULARY).astype(np.int32),
        top=(chosen[:, None] - places).astype(np.float32),
        ranks=(1 + tokens % VOCABULARY).astype(np.int32),
    )


def _sampled_logprobs(tokens: list[int], sample: SampleRows) -> Logprobs | None:
    if sample.num_logprobs is None:
        return None
    wanted = np.flatnonzero(sample.num_logprobs >= 0)
    return logprobs_of(np.array(tokens, np.int64)[wanted], int(sample.num_logprobs.max()))


def _prompt_logprobs(prompt: PromptTokens | None) -> Logprobs | None:
    return None if prompt is None else logprobs_of(prompt.token_ids, int(prompt.num_top.max()))


class KvHonest:
    """Implements `Executor`. `row_salts` [S] must be set before `execute` where sequences have different domains."""

    def __init__(self, pool: PoolSpec, vocabulary: int = VOCABULARY) -> None:
        self._pool = pool
        self._vocabulary = vocabulary
        count = pool.num_blocks * pool.block_size
        self.salts: UInt64 = np.zeros(count, np.uint64)
        self.positions: Int64 = np.full(count, -1, np.int64)
        self.hashes: UInt64 = np.zeros(count, np.uint64)
        self.row_salts: UInt64 | None = None

    @property
    def pool(self) -> PoolSpec:
        return self._pool

    def zero_blocks(self, block_ids: Int32) -> None:
        slots = self.slots_of(block_ids)
        self.salts[slots] = 0
        self.positions[slots] = -1
        self.hashes[slots] = 0

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        self.copy_from(self, src, dst)

    def copy_from(self, other: KvHonest, src: Int32, dst: Int32) -> None:
        """Blocks src [N] of another pool, or of this one, to blocks dst [N] of this one."""
        source, target = other.slots_of(src), self.slots_of(dst)
        self.salts[target] = other.salts[source]
        self.positions[target] = other.positions[source]
        self.hashes[target] = other.hashes[source]

    def slots_of(self, block_ids: npt.NDArray[np.integer]) -> Int64:
        """Slots of whole blocks, in order, shape [N * block_size]."""
        size = self._pool.block_size
        slots: Int64 = (block_ids.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        return slots

    def execute(self, batch: StepBatch) -> StepOutput:
        rows = len(batch.context_lens)
        salts = self.row_salts if self.row_salts is not None else np.zeros(rows, np.uint64)
        assert len(salts) == rows
        new = np.diff(batch.query_starts).astype(np.int64)
        starts = batch.context_lens.astype(np.int64) - new
        before = self._read(batch, starts, salts)
        self._write(batch, new, salts, before)
        digests = self._read(batch, batch.context_lens.astype(np.int64), salts)[0]
        sample = batch.sample
        tokens = [
            _next_token(int(digests[row]), int(seed), int(position), self._vocabulary)
            for row, seed, position in zip(sample.rows, sample.seed, sample.position, strict=True)
        ]
        return StepOutput(np.array(tokens, np.int32), _sampled_logprobs(tokens, sample), _prompt_logprobs(batch.prompt))

    def _read(self, batch: StepBatch, counts: Int64, salts: UInt64) -> tuple[UInt64, UInt64]:
        """Per row: what its first `counts` slots say together, and the hash that the next slot builds on.

        A slot whose salt or position is not the row's adds to that hash, so the error stays visible ever after.
        """
        size = self._pool.block_size
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = batch.block_tables[row, place // size].astype(np.int64) * size + place % size
        views = _views(self.salts[slots], place.astype(np.uint64), self.hashes[slots])
        wrong = (self.positions[slots] != place) | (self.salts[slots] != salts[row])
        views[wrong] += np.uint64(_C)
        digests = np.zeros(len(counts), np.uint64)
        np.add.at(digests, row, views)
        chain = np.full(len(counts), _NOTHING, np.uint64)
        started = counts > 0
        last = np.maximum(np.cumsum(counts) - 1, 0)[started]
        chain[started] = self.hashes[slots[last]]
        np.add.at(chain, row[wrong], np.uint64(_B))
        return digests, chain

    def _write(self, batch: StepBatch, new: Int64, salts: UInt64, before: tuple[UInt64, UInt64]) -> None:
        terms = _token_terms(batch.token_ids.astype(np.uint64), batch.positions.astype(np.uint64))
        row = np.repeat(np.arange(len(new)), new)
        sums = np.cumsum(terms)
        first = (np.cumsum(new) - new)[row]
        hashes = before[1][row] + sums - sums[first] + terms[first]
        self.salts[batch.slots] = salts[row]
        self.positions[batch.slots] = batch.positions
        self.hashes[batch.slots] = hashes
