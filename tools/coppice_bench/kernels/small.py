"""What surrounds attention: writing and copying blocks, norms, gates, sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from coppice_bench.kernels.attention import LARGE, SMALL, Load, batch_of
from coppice_bench.kernels.cases import CaseMaker, KernelCase
from coppice_worker.core.batch.plain_batch import rows_alike
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.backend import Backend, Heads, LayerAttention
from coppice_worker.kernels.choice import choose_backend
from coppice_worker.kernels.pool import KvPool, KvShape

_TURNS = 4  # sets of operands that take turns, so that no cache holds them all


def small_cases(device: torch.device, dtypes: tuple[torch.dtype, ...], *, quick: bool) -> list[CaseMaker]:
    makers = (_write, _copy, _zero, _add_norm, _gate, _sample_greedy, _sample_nucleus)
    return [partial(maker, device, dtype, _tokens(device, quick=quick)) for dtype in dtypes for maker in makers]


def _tokens(device: torch.device, *, quick: bool) -> int:
    """Of a step: on CUDA what makes some 64 MB of hidden states."""
    if quick:
        return 64
    return 8192 if device.type == "cuda" else 2048


def _backend(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Backend, KvPool]:
    geometry = LARGE if device.type == "cuda" else SMALL
    num_layers = _TURNS
    pool = KvPool(
        KvShape(num_layers, geometry.num_kv_heads, geometry.head_dim),
        num_blocks=4 * tokens // geometry.block_size, block_size=geometry.block_size, device=device, dtype=dtype,
    )  # fmt: skip
    layer = LayerAttention(scale=geometry.head_dim**-0.5)
    return choose_backend("auto", pool, Heads(geometry.num_heads, (layer,) * num_layers)), pool


def _write(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    """Rotates queries and keys, and stores keys and values."""
    geometry = LARGE if device.type == "cuda" else SMALL
    backend, _ = _backend(device, dtype, tokens)
    batch, _ = batch_of(Load("", (tokens,), (0,)), geometry.block_size)
    step = backend.plan(batch)
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    qkv = [torch.randn(tokens, heads, geometry.head_dim, device=device).to(dtype) for _ in range(_TURNS)]
    radians = torch.rand(tokens, 1, geometry.head_dim // 2, device=device) * 6
    angles = radians.cos().to(dtype), radians.sin().to(dtype)
    turn = count()

    def ours() -> object:
        layer = next(turn) % _TURNS
        return step.write(layer, qkv[layer], angles)

    return KernelCase(f"rotate, write {tokens}", dtype, "copy", 2 * qkv[0].nbytes, ours)


def _copy(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    backend, pool = _backend(device, dtype, tokens)
    half = pool.num_blocks // 2
    order = np.random.default_rng(0).permutation(pool.num_blocks).astype(np.int32)
    src, dst = order[:half], order[half : 2 * half]
    (planes, *_), (src_ids, dst_ids) = pool.planes(), (torch.from_numpy(ids).long().to(device) for ids in (src, dst))
    return KernelCase(
        f"copy {half} blocks", dtype, "copy", pool.storage.nbytes,
        lambda: backend.copy_blocks(src, dst),
        {"torch": lambda: planes.index_copy_(1, dst_ids, planes.index_select(1, src_ids))},
    )  # fmt: skip


def _zero(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    backend, pool = _backend(device, dtype, tokens)
    ids = np.random.default_rng(0).permutation(pool.num_blocks)[: pool.num_blocks // 2].astype(np.int32)
    (planes, *_), on_device = pool.planes(), torch.from_numpy(ids).long().to(device)
    return KernelCase(
        f"zero {len(ids)} blocks", dtype, "copy", pool.storage.nbytes / 2,
        lambda: backend.zero_blocks(ids), {"torch": lambda: planes.index_fill_(1, on_device, 0)},
    )  # fmt: skip


def _hidden_size(device: torch.device) -> int:
    return 4096 if device.type == "cuda" else 512


def _add_norm(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    size = _hidden_size(device)
    backend, _ = _backend(device, dtype, 64)
    hidden, delta = ([torch.randn(tokens, size, device=device).to(dtype) for _ in range(_TURNS)] for _ in range(2))
    weight = torch.randn(size, device=device)
    turn = count()
    narrow = weight.to(dtype)

    def ours() -> object:
        index = next(turn) % _TURNS
        return backend.arithmetic.add_norm(hidden[index], delta[index], weight, 1e-5)

    def torchs() -> object:
        index = next(turn) % _TURNS
        hidden[index] += delta[index]
        return rms_norm(hidden[index], (size,), narrow, 1e-5)

    return KernelCase(f"add, norm {tokens} x {size}", dtype, "copy", 4 * hidden[0].nbytes, ours, {"torch": torchs})


def _gate(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    size = 14336 if device.type == "cuda" else 1536
    backend, _ = _backend(device, dtype, 64)
    both = [torch.randn(tokens, 2 * size, device=device).to(dtype) for _ in range(_TURNS)]
    turn = count()

    def torchs() -> object:
        gate, up = both[next(turn) % _TURNS].chunk(2, dim=-1)
        return silu(gate) * up

    return KernelCase(
        f"silu, multiply {tokens} x {size}", dtype, "copy", 1.5 * both[0].nbytes,
        lambda: backend.arithmetic.gate(both[next(turn) % _TURNS], "silu"), {"torch": torchs},
    )  # fmt: skip


def _logits(device: torch.device, dtype: torch.dtype, tokens: int) -> torch.Tensor:
    rows, vocab = (64, 128_256) if device.type == "cuda" else (32, 32_000)
    return (torch.randn(min(rows, tokens), vocab, device=device) * 4).to(dtype)


def _rows(count_rows: int, temperature: float) -> SampleRows:
    """Top-k 50, top-p 0.9."""
    rows = rows_alike(np.zeros(count_rows, np.int64), temperature=temperature, top_k=50, top_p=0.9)
    return replace(rows, seed=np.arange(count_rows, dtype=np.uint64))


def _sample_greedy(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    backend, _ = _backend(device, dtype, 64)
    logits = _logits(device, dtype, tokens)
    rows = _rows(logits.shape[0], 0.0)
    return KernelCase(
        f"greedy {logits.shape[0]} x {logits.shape[1]}", dtype, "copy", logits.nbytes,
        lambda: backend.arithmetic.choose(logits, rows), {"torch": lambda: logits.argmax(dim=-1)},
    )  # fmt: skip


def _sample_nucleus(device: torch.device, dtype: torch.dtype, tokens: int) -> KernelCase:
    """Top-k 50, top-p 0.9 at temperature 0.8, beside sorting the vocabulary."""
    backend, _ = _backend(device, dtype, 64)
    logits = _logits(device, dtype, tokens)
    count_rows = logits.shape[0]
    rows = _rows(count_rows, 0.8)

    def by_sorting() -> object:
        ordered, index = (logits.float() / 0.8).sort(dim=-1, descending=True)
        ordered[:, 50:] = float("-inf")
        weights = ordered.softmax(dim=-1)
        weights[weights.cumsum(dim=-1) - weights > 0.9] = 0
        return index.gather(1, weights.multinomial(1))

    return KernelCase(
        f"top-k, top-p {count_rows} x {logits.shape[1]}", dtype, "copy", logits.nbytes,
        lambda: backend.arithmetic.choose(logits, rows), {"torch by sorting": by_sorting},
    )  # fmt: skip
