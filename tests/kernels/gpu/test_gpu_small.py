"""The compiled kernels between attention on a real device: writing, moving blocks, norms, gates, choosing tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.choices import pack_choices
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels import torch_sampling
from coppice_worker.kernels.backend import Activation, HeadNorms, Heads, LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool, KvShape, LayerBlocks
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
FLOAT8 = torch.float8_e4m3fn
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step, as a share of the element


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(CUDA)


def rotated(
    heads: torch.Tensor, weight: torch.Tensor | None, angles: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Normed and rotated heads in float64."""
    wide, (cos, sin) = heads.double(), (angle.double() for angle in angles)
    if weight is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    first, second = wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "head_dim"), [(32, 8, 128), (14, 2, 64), (6, 1, 80), (8, 8, 96), (8, 4, 256)]
)
def test_write(
    dtype: torch.dtype, is_float8: bool, has_norms: bool, num_heads: int, num_kv: int, head_dim: int
) -> None:
    from coppice_worker.kernels.triton.write import write

    num_tokens, num_blocks, block = 300, 40, 16
    norms = HeadNorms(random(head_dim) + 1, random(head_dim) - 1, 1e-6) if has_norms else None
    slots = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(1))[:num_tokens].to(CUDA)
    slots[100:110] = -1
    wide = random(num_tokens, num_heads + 2 * num_kv + 1, head_dim, dtype=dtype)
    before, qkv = wide.clone(), wide[:, : num_heads + 2 * num_kv]
    angles = (
        random(num_tokens, 1, head_dim // 2, dtype=dtype).cos(),
        random(num_tokens, 1, head_dim // 2).sin().to(dtype),
    )
    planes = [torch.zeros(num_blocks, num_kv, block, head_dim, device=CUDA, dtype=dtype) for _ in range(2)]
    scales: list[torch.Tensor | None] = [None, None]
    if is_float8:
        planes = [plane.to(FLOAT8) for plane in planes]
        scales = [torch.zeros(num_blocks, num_kv, block, device=CUDA) for _ in range(2)]
    blocks = LayerBlocks(planes[0], planes[1], scales[0], scales[1])
    query = write(qkv, angles, slots, blocks, LayerAttention(1.0, head_norms=norms), num_heads)
    real = slots >= 0
    parts = before[:, : qkv.shape[1]].split([num_heads, num_kv, num_kv], dim=1)
    wanted_query = rotated(parts[0], norms and norms.query, angles)
    tolerance = 1.1 * ROUNDING[dtype]
    torch.testing.assert_close(query[real].double(), wanted_query[real], rtol=tolerance, atol=1e-5)
    assert torch.equal(wide[~real], before[~real])
    assert torch.equal(wide[:, num_heads:], before[:, num_heads:])
    places, offsets = slots[real] // block, slots[real] % block
    for plane, plane_scales, wanted in zip(
        planes, scales, (rotated(parts[1], norms and norms.key, angles), parts[2].double()), strict=True
    ):
        assert int((plane.float().abs().sum(-1) > 0).sum()) == int(real.sum()) * num_kv
        stored = plane.float().double()[places, :, offsets]
        if plane_scales is None:
            torch.testing.assert_close(stored, wanted[real], rtol=tolerance, atol=1e-5)
            continue
        scale = plane_scales.double()[places, :, offsets]
        torch.testing.assert_close(scale, wanted[real].abs().amax(-1) / FLOAT8_MAX, rtol=1e-5, atol=0)
        allowed = torch.maximum(wanted[real].abs() / 16, scale.unsqueeze(-1) * 2**-10) * 1.001
        assert ((stored * scale.unsqueeze(-1) - wanted[real]).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
@pytest.mark.parametrize(("num_kv", "head_dim", "block"), [(8, 128, 16), (1, 80, 16), (2, 64, 64)])
def test_blocks_move(dtype: torch.dtype, num_kv: int, head_dim: int, block: int) -> None:
    from coppice_worker.kernels.triton.backend import TritonBackend

    pool = KvPool(KvShape(3, num_kv, head_dim), num_blocks=50, block_size=block, device=CUDA, dtype=dtype)
    for plane in pool.planes():
        plane.copy_(torch.randint(-(2**31), 2**31, plane.shape, device=CUDA))
    wanted = [plane.clone() for plane in pool.planes()]
    backend = TritonBackend(pool, Heads(num_kv, (LayerAttention(1.0),) * 3))
    ids = np.random.default_rng(0).permutation(50).astype(np.int32)
    staging = torch.zeros(10, pool.bytes_per_block, dtype=torch.uint8, device=CUDA)
    backend.gather_blocks(ids[:10], staging)
    backend.copy_blocks(ids[10:20], ids[20:30])
    backend.scatter_blocks(staging, ids[30:40])
    backend.zero_blocks(ids[40:45])
    for plane, want in zip(pool.planes(), wanted, strict=True):
        at = torch.from_numpy(ids).long().to(CUDA)
        want[:, at[20:30]] = want[:, at[10:20]]
        want[:, at[30:40]] = want[:, at[:10]]
        want[:, at[40:45]] = 0
        assert torch.equal(plane, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [896, 2880, 4096, 16384])
def test_add_norm(dtype: torch.dtype, size: int) -> None:
    from coppice_worker.kernels.triton.arithmetic import TritonArithmetic

    hidden, delta, weight = random(70, size, dtype=dtype), random(70, size, dtype=dtype) * 3, random(size)
    total = (hidden.float() + delta.float()).to(dtype)
    wide = total.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = TritonArithmetic().add_norm(hidden, delta, weight, 1e-6)
    torch.testing.assert_close(found.double(), wanted, rtol=1.1 * ROUNDING.get(dtype, 1e-5), atol=1e-5)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17])
@pytest.mark.parametrize(
    ("columns", "depth", "activation"), [(4096, 14336, None), (1000, 904, None), (14336, 4096, "silu")]
)
def test_projections_of_few_rows(
    columns: int, depth: int, activation: Activation | None, num_rows: int, dtype: torch.dtype
) -> None:
    from coppice_worker.kernels.triton.arithmetic import TritonArithmetic
    from coppice_worker.kernels.triton.few_rows import FewRows

    outs = columns * (1 if activation is None else 2)
    weight, bias = random(outs, depth, dtype=dtype) * depth**-0.5, random(outs, dtype=dtype)
    rows, makes = random(num_rows, depth, dtype=dtype), FewRows(dtype, TritonArithmetic())
    ours = makes.project(weight, bias) if activation is None else makes.gated(weight, bias, activation)
    out = ours(rows)
    wide = rows.double() @ weight.double().t() + bias.double()
    if activation is not None:
        gate, up = wide.chunk(2, dim=-1)
        wide = gate * torch.sigmoid(gate) * up
    tolerance = 4 * ROUNDING[dtype]
    torch.testing.assert_close(out.double(), wide, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation: Activation) -> None:
    from coppice_worker.kernels.triton.arithmetic import TritonArithmetic

    both = random(33, 2 * 4864, dtype=torch.bfloat16) * 10
    gate, up = both.double().chunk(2, dim=-1)
    inner = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    found = TritonArithmetic().gate(both, activation)
    torch.testing.assert_close(found.double(), gate * up * torch.sigmoid(inner), rtol=1.1 * 2**-8, atol=1e-5)


def mixed_rows(count: int, seed: int) -> SampleRows:
    rng = np.random.default_rng(seed)
    return SampleRows(
        rows=np.arange(count, dtype=np.int32),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7], count, p=[0.1, 0.3, 0.4, 0.2]).astype(np.float32),
        top_k=rng.choice([0, 1, 40, 1000, 200_000], count).astype(np.int32),
        top_p=rng.choice([1.0, 0.99, 0.9, 0.3, 0.0], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.001, 0.2, 1.0], count, p=[0.6, 0.2, 0.1, 0.1]).astype(np.float32),
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        position=rng.integers(0, 100_000, count).astype(np.int64),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.02, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [300, 32_000, 152_064])
def test_tokens_are_those_of_torch(dtype: torch.dtype, spread: float, vocab: int) -> None:
    from coppice_worker.kernels.triton.sampling import argmax, choose

    logits, rows = random(64, vocab, dtype=dtype) * spread, mixed_rows(64, vocab)
    logits[3, ::2] = float("-inf")
    logits[4] = 1.0
    wanted = torch_sampling.choose(logits.cpu(), rows)
    # Sums and exponentials are rounded in other places: a draw that falls within 1e-6 of a border may go either way.
    assert int((choose(logits, rows).cpu() != wanted).sum()) <= 1
    logits[5, vocab // 2] = float("nan")
    assert torch.equal(argmax(logits).cpu(), torch_sampling.first_argmax(logits.cpu()))


def test_a_graph_chooses_by_what_its_arrays_hold() -> None:
    from coppice_worker.kernels.triton.sampling import choose, choose_packed

    logits = torch.zeros(16, 50_000, device=CUDA)
    choices = torch.zeros(16, 5, dtype=torch.float64, device=CUDA)
    choose_packed(logits, choices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = choose_packed(logits, choices)
    for seed in range(3):
        logits.copy_(random(16, 50_000 + seed)[:, :50_000] * 3)
        rows = mixed_rows(16, seed)
        choices.copy_(torch.from_numpy(pack_choices(rows)))
        graph.replay()
        assert torch.equal(tokens, choose(logits, rows))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_over_float8_blocks(family: str, tmp_path: Path) -> None:
    """Prefill, a chunk after context, and a decode, beside float32 on the CPU."""
    checkpoint = write_tiny_checkpoint(tmp_path, family)
    plain = TorchExecutor(checkpoint, num_blocks=8, kernels="torch")
    narrow = TorchExecutor(checkpoint, num_blocks=8, device="cuda", dtype="bfloat16", kv_dtype="fp8", kernels="triton")
    sequence = DrivenSequence([int(t) for t in np.random.default_rng(1).integers(0, 256, 70)], [3, 1, 6, 0, 7])
    for executor in (plain, narrow):
        executor.execute(build_batch([sequence], [40], 16))
    for done in (40, 70):
        sequence.num_computed_tokens = done
        batch = build_batch([sequence], [len(sequence.tokens) - done], 16)
        wanted, found = plain.logits(batch), narrow.logits(batch).float().cpu()
        assert (found - wanted).square().mean().sqrt() < 0.15 * wanted.std()
        sequence.tokens.append(5)
