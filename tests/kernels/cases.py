"""Small pools with guards: every block that no sequence owns holds NaN, and so does every slot past a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import SampleRows, StepBatch
from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import Angles, Backend, Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape

NO_SAMPLES = SampleRows(
    rows=np.empty(0, np.int32),
    temperature=np.empty(0, np.float32),
    top_k=np.empty(0, np.int32),
    top_p=np.empty(0, np.float32),
    min_p=np.empty(0, np.float32),
    seed=np.empty(0, np.uint64),
    position=np.empty(0, np.int64),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One step: a pool of one layer whose earlier tokens are filled, and the new tokens' q, k and v."""

    pool: KvPool
    batch: StepBatch
    qkv: torch.Tensor  # [T, H + 2 HK, D], as a projection leaves it
    layer: LayerAttention

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, (self.layer,))

    @property
    def num_heads(self) -> int:
        return self.qkv.shape[1] - 2 * self.pool.shape.num_kv_heads

    @property
    def query(self) -> torch.Tensor:
        """[T, H, D], rows strided."""
        return self.qkv[:, : self.num_heads]

    @property
    def key(self) -> torch.Tensor:
        return self.qkv[:, self.num_heads : self.num_heads + self.pool.shape.num_kv_heads]

    @property
    def value(self) -> torch.Tensor:
        return self.qkv[:, self.num_heads + self.pool.shape.num_kv_heads :]


def make_case(
    new_tokens: Sequence[int],
    before: Sequence[int],
    *,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    seed: int = 0,
    layer: LayerAttention | None = None,
) -> Case:
    """Sequences with `before` tokens of KV and `new_tokens` more, on randomly placed blocks.

    `layer` says how to attend; by default with nothing but the usual scale.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = np.array(new_tokens) + np.array(before)
    needs = -(-lens // block_size)
    num_blocks = int(needs.sum()) + 3
    shape = KvShape(1, num_kv_heads, head_dim)
    pool = KvPool(shape, num_blocks=num_blocks, block_size=block_size, device=torch.device("cpu"), dtype=torch.float32)
    pool.storage.fill_(float("nan"))
    order = np.random.default_rng(seed).permutation(num_blocks)
    tables = np.zeros((len(lens), int(needs.max()) + 1), dtype=np.int32)
    slots, used = [], 0
    for row, need in enumerate(needs):
        tables[row, :need] = order[used : used + need]
        used += need
        positions = np.arange(lens[row])
        all_slots = tables[row][positions // block_size].astype(np.int64) * block_size + positions % block_size
        for slot in all_slots[: before[row]]:
            at = (0, slice(None), slot // block_size, slice(None), slot % block_size)
            pool.storage[at] = torch.randn(2, num_kv_heads, head_dim, generator=generator)
        slots.append(all_slots[before[row] :])
    total = int(np.sum(new_tokens))
    batch = StepBatch(
        token_ids=np.zeros(total, np.int64),
        positions=np.concatenate([np.arange(b, n) for b, n in zip(before, lens, strict=True)]).astype(np.int64),
        slots=np.concatenate(slots),
        query_starts=np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32),
        context_lens=lens.astype(np.int32),
        block_tables=tables,
        sample=NO_SAMPLES,
    )
    qkv = torch.randn(total, num_kv_heads * (group + 2), head_dim, generator=generator)
    return Case(pool, batch, qkv, layer or LayerAttention(scale=head_dim**-0.5))


def attend(backend: Backend, case: Case) -> torch.Tensor:
    """[T, H, D] as the backend computes it; the case's pool has the new KV afterwards."""
    step = backend.plan(case.batch)
    query = step.write(0, case.qkv, no_rotation(case.qkv))
    return step.attend(0, query).view(case.query.shape)


def no_rotation(qkv: torch.Tensor) -> Angles:
    """Angles that change nothing: attention alone is looked at, and exactly."""
    ones = qkv.new_ones((qkv.shape[0], 1, qkv.shape[2] // 2))
    return ones, torch.zeros_like(ones)


def expected(case: Case) -> torch.Tensor:
    """What attention gives on the pool after the step; also checks what the step wrote, and that it wrote no more."""
    keys, values = case.pool.keys(0), case.pool.values(0)
    for pool, heads in ((keys, case.key), (values, case.value)):
        wanted = torch.full_like(pool, float("nan"))
        reference.write_kv(wanted, heads, torch.from_numpy(case.batch.slots))
        written = ~wanted.isnan()
        assert torch.equal(pool[written], wanted[written])
        assert (~pool.isnan()).sum() == int(case.batch.context_lens.sum()) * pool.shape[1] * pool.shape[3]
    return reference_of(case)


def reference_of(case: Case) -> torch.Tensor:
    """What attention gives on the pool as it is."""
    batch = case.batch
    return reference.attend(
        case.layer,
        case.query,
        case.pool.keys(0),
        case.pool.values(0),
        *(torch.from_numpy(array) for array in (batch.block_tables, batch.context_lens, batch.query_starts)),
    )


def assert_exact(backend: Backend, case: Case) -> None:
    out = attend(backend, case)
    torch.testing.assert_close(out.double(), expected(case), atol=2e-6, rtol=1e-5)
