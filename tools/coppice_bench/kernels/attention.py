"""Attention over blocks, at sizes of decoding and of chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

from coppice_bench.kernels.cases import CaseMaker, KernelCase
from coppice_bench.kernels.peers import Contiguous, attention_peers
from coppice_worker.core.batch.plain_batch import packed_batch, rows_alike
from coppice_worker.core.batch.step_batch import StepBatch
from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.choice import choose_backend
from coppice_worker.kernels.pool import KvPool, KvShape


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads of a model, and how many layers take turns so that no cache holds them all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int


LARGE = Geometry(
    num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, num_layers=4
)  # Llama 3.1 8B; one of 64 x 4096 would partly stay in the L2
SMALL = Geometry(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, num_layers=8)  # the CPU model, 40M


@dataclass(frozen=True, slots=True)
class Load:
    """Rows with `new` tokens after `before` ones; the first `shared` tokens of all rows lie in the same blocks."""

    name: str
    new: tuple[int, ...]
    before: tuple[int, ...]
    shared: int = 0


def decode_load(name: str, lens: tuple[int, ...], shared: int = 0) -> Load:
    return Load(name, (1,) * len(lens), tuple(length - 1 for length in lens), shared)


FLOAT8_LOAD = decode_load("decode fp8 64 x 4096", (4096,) * 64)


def ragged(total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths between the two that grow by powers of two, over and over, with about that sum."""
    steps = [shortest]
    while steps[-1] * 2 <= longest:
        steps.append(steps[-1] * 2)
    rounds = max(1, round(total / sum(steps)))
    return tuple(steps * rounds)


def attention_cases(device: torch.device, dtypes: tuple[torch.dtype, ...], *, quick: bool) -> list[CaseMaker]:
    on_chip = device.type == "cuda"
    geometry = LARGE if on_chip else SMALL
    make = partial(partial, _make, geometry, device)
    cases: list[CaseMaker] = [
        make(load, dtype) for dtype in dtypes for load in attention_loads(on_chip=on_chip, quick=quick)
    ]
    if on_chip:
        cases.append(make(FLOAT8_LOAD, dtypes[0], torch.float8_e4m3fn))
    return cases


def attention_loads(*, on_chip: bool, quick: bool) -> list[Load]:
    if quick:
        return [decode_load("decode 4 x 256", (256,) * 4), Load("prefill 64 after 64", (64,), (64,))]
    if on_chip:
        return [
            decode_load("decode 64 x 4096", (4096,) * 64),
            decode_load("decode 8 x 4096", (4096,) * 8),
            decode_load("decode 256 x 512", (512,) * 256),
            decode_load("decode 1 x 32768", (32768,)),
            decode_load("decode 1 x 131072", (131_072,)),
            decode_load("decode ragged", ragged(64 * 4096, 128, 32768)),
            decode_load("decode 64 x 4096, 3584 shared", (4096,) * 64, shared=3584),
            Load("prefill 2048 after 6144", (2048,), (6144,)),
            Load("prefill 8192", (8192,), (0,)),
            Load("prefill 4 x 2048 after 8192", (2048,) * 4, (8192,) * 4),
        ]
    return [
        decode_load("decode 32 x 512", (512,) * 32),
        decode_load("decode 8 x 512", (512,) * 8),
        decode_load("decode 1 x 4096", (4096,)),
        decode_load("decode ragged", ragged(16_384, 128, 4096)),
        Load("prefill 512 after 512", (512,), (512,)),
        Load("prefill 1024", (1024,), (0,)),
    ]


def _make(
    geometry: Geometry, device: torch.device, load: Load, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> KernelCase:
    shape = KvShape(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    batch, num_blocks = batch_of(load, geometry.block_size)
    pool = KvPool(
        shape, num_blocks=num_blocks, block_size=geometry.block_size, device=device,
        dtype=kv_dtype or dtype, content_dtype=dtype,
    )  # fmt: skip
    _fill(pool)
    layer = LayerAttention(scale=geometry.head_dim**-0.5)
    heads = Heads(geometry.num_heads, (layer,) * geometry.num_layers)
    backend = choose_backend("auto", pool, heads)
    step = backend.plan(batch)
    wide = (len(batch.token_ids), geometry.num_heads + 2 * geometry.num_kv_heads, geometry.head_dim)
    qkv = torch.randn(wide, device=device).to(dtype)
    unchanged = qkv.new_ones((wide[0], 1, wide[2] // 2))
    for index in range(geometry.num_layers):
        query = step.write(index, qkv, (unchanged, torch.zeros_like(unchanged)))
    contiguous = None
    if kv_dtype is None:
        contiguous = [_contiguous(pool, layer, batch, query) for layer in range(geometry.num_layers)]
    peers, left_out = attention_peers(contiguous)
    is_decode = max(load.new) == 1
    turn = count()
    return KernelCase(
        name=load.name,
        dtype=dtype,
        bound="copy" if is_decode else "matmul",
        work=_kv_bytes(load, pool) + 2 * query.nbytes if is_decode else _flops(load, geometry),
        ours=lambda: step.attend(next(turn) % geometry.num_layers, query),
        peers=peers,
        left_out=left_out,
        comparable=frozenset({"sdpa"}),
    )


def _fill(pool: KvPool) -> None:
    for part in pool.storage.view(-1, *pool.storage.shape[2:]):
        part.copy_(torch.randn(part.shape, device=part.device))
    if pool.scales is not None:
        pool.scales.fill_(1.0)


def _kv_bytes(load: Load, pool: KvPool) -> int:
    """K and V of one layer, each token once, shared ones once for all."""
    tokens = sum(load.new) + sum(load.before) - load.shared * (len(load.new) - 1)
    return tokens * pool.shape.bytes_per_block(1, pool.storage.dtype) // pool.shape.num_layers


def _flops(load: Load, geometry: Geometry) -> float:
    pairs = sum(new * before + new * (new + 1) / 2 for new, before in zip(load.new, load.before, strict=True))
    return 4 * geometry.num_heads * geometry.head_dim * pairs


def batch_of(load: Load, block_size: int) -> tuple[StepBatch, int]:
    """Rows on randomly placed blocks, and how many blocks there are."""
    new, lens = np.array(load.new), np.array(load.new) + np.array(load.before)
    needs = -(-lens // block_size)
    num_shared = load.shared // block_size
    num_blocks = int(needs.sum()) - num_shared * (len(lens) - 1)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(lens), int(needs.max())), np.int32)
    tables[:, :num_shared] = order[:num_shared]
    used = num_shared
    for row, need in enumerate(needs):
        tables[row, num_shared:need] = order[used : used + need - num_shared]
        used += int(need) - num_shared
    nobody = rows_alike(np.zeros(0, np.int64))
    return packed_batch(new, lens, tables, block_size, nobody), num_blocks


def _contiguous(pool: KvPool, layer: int, batch: StepBatch, query: torch.Tensor) -> Contiguous:
    """The same KV, row by row in one piece, as the peers want it."""
    parts = []
    for blocks in (pool.keys(layer), pool.values(layer)):
        rows = []
        for table, length in zip(batch.block_tables, batch.context_lens, strict=True):
            used = torch.from_numpy(table[: -(-int(length) // pool.block_size)].astype(np.int64)).to(blocks.device)
            tokens = blocks.index_select(0, used).transpose(0, 1).flatten(1, 2)  # [HK, tokens, D]
            rows.append(tokens[:, : int(length)].transpose(0, 1))
        parts.append(torch.cat(rows).contiguous())
    return Contiguous(query, parts[0], parts[1], np.diff(batch.query_starts), batch.context_lens)
