"""Graphs without a device: launches that are done again, and a step that reads its rows when it is done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, StepBatch
from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import Angles, AttentionStep, Heads, StepRows
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_arithmetic import rotate
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.kernels.torch_sampling import choose_packed


class Recorded:
    """`Graphs` that call what they were given, also when they are made, unless that takes too long."""

    def __init__(self, *, tries: bool = True) -> None:
        self.num_replays = self.num_captured = 0
        self._tries = tries

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        if self._tries:
            work()

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


CHUNKS_MAX = 3  # rows that launches have room for


class RecordableBackend(TorchBackend):
    """Torch's kernels, and a `GraphBackend` by the reference: row by row, padding left alone."""

    def __init__(self, pool: KvPool, heads: Heads) -> None:
        super().__init__(pool, heads)
        self.padding = 0  # rows that were padding, over all layers and steps
        self.num_shared = 0  # attended by launches for what rows have in common
        self.sizes: list[int] = []  # tokens that launches were for, as they read their rows

    def plan_rows(self, rows: StepRows) -> AttentionStep:
        return _Step(self, rows)

    def choose_decodes(self, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        return choose_packed(logits, choices.numpy())

    def common_size(self, rows_max: int) -> int:
        return 2

    def common(self, batch: StepBatch, rows_max: int) -> Int32 | None:
        """How many blocks all rows begin with, and a number that nobody reads. Not beside chunks."""
        if len(batch.token_ids) > len(batch.context_lens):
            return None
        full = int((batch.context_lens.min() - 1) // self.pool.block_size)
        same = (batch.block_tables[:, :full] == batch.block_tables[0, :full]).all(axis=0)
        shared = int(np.argmin([*same, False]))
        return np.array([shared, -1], np.int32) if shared and len(batch.context_lens) > 1 else None

    def chunks_size(self, num_tokens: int) -> int:
        return num_tokens

    def chunks(self, batch: StepBatch, num_tokens: int) -> Int32 | None:
        """How many rows have several new tokens."""
        count = int((np.diff(batch.query_starts) > 1).sum())
        return np.full(num_tokens, count, np.int32) if count <= CHUNKS_MAX else None


class _Step:
    def __init__(self, backend: RecordableBackend, rows: StepRows) -> None:
        self._backend, self._rows = backend, rows

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        pool, num_heads = self._backend.pool, self._backend.heads.num_heads
        num_rotated = num_heads + pool.shape.num_kv_heads
        rotated = rotate(qkv[:, :num_rotated], angles)
        real = self._rows.slots >= 0
        slots = self._rows.slots[real]
        reference.write_kv(pool.keys(layer), rotated[real][:, num_heads:], slots)
        reference.write_kv(pool.values(layer), qkv[real][:, num_rotated:], slots)
        return rotated[:, :num_heads]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        backend, rows = self._backend, self._rows
        out = torch.full(query.shape, float("nan"))  # what padding gets is anything
        real = rows.context_lens > 0
        count = int(real.sum())
        num_tokens = int(rows.query_starts[count])
        assert real[:count].all(), "padding stands behind the batch"
        assert (rows.slots >= 0).tolist() == [True] * num_tokens + [False] * (len(rows.slots) - num_tokens)
        new_tokens = rows.query_starts.diff()
        if rows.chunks is None:
            assert (new_tokens == 1).all()
        else:
            assert not new_tokens[count:].any(), "rows that are padding have no tokens"
            assert (rows.chunks == (new_tokens > 1).sum()).all()
        backend.padding += len(rows.slots) - num_tokens
        if layer == 0:
            backend.sizes.append(len(rows.slots))
        if rows.common is not None and count:
            shared = int(rows.common[0])
            assert shared
            assert (rows.block_tables[:count, :shared] == rows.block_tables[0, :shared]).all()
            backend.num_shared += 1
        if count:
            out[:num_tokens] = reference.attend(
                backend.heads.layers[layer],
                query[:num_tokens],
                backend.pool.keys(layer),
                backend.pool.values(layer),
                rows.block_tables[:count],
                rows.context_lens[:count],
                rows.query_starts[: count + 1],
            ).float()
        return out.view(len(query), -1)
