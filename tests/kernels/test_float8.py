"""KV in float8: what is kept of it, and that attention by torch reads just that."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.choice import KernelsUnavailable, choose_backend
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from coppice_worker.kernels.torch_arithmetic import to_float8
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.pool_size import suggest_num_blocks
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch
from tests.kernels.cases import Case, attend, make_case, reference_of

FLOAT8 = torch.float8_e4m3fn


def of_float8(case: Case, content_dtype: torch.dtype = torch.float32) -> Case:
    """The same step over a pool of float8; what is NaN stays NaN, and so do scales where no token is."""
    plain = case.pool
    pool = KvPool(
        plain.shape,
        num_blocks=plain.num_blocks,
        block_size=plain.block_size,
        device=torch.device("cpu"),
        dtype=FLOAT8,
        content_dtype=content_dtype,
    )
    assert pool.scales is not None
    narrow, scales = to_float8(plain.storage)
    pool.storage.view(torch.uint8).copy_(narrow.view(torch.uint8))
    pool.scales.copy_(scales)
    return replace(case, pool=pool, qkv=case.qkv.to(content_dtype))


def read_back(pool: KvPool) -> KvPool:
    """In float32 what its blocks stand for."""
    assert pool.scales is not None
    device, shape = torch.device("cpu"), pool.shape
    wide = KvPool(shape, num_blocks=pool.num_blocks, block_size=pool.block_size, device=device, dtype=torch.float32)
    wide.storage.copy_(pool.storage.float() * pool.scales.unsqueeze(-1))
    return wide


def test_a_head_is_kept_to_three_bits_of_its_own_size() -> None:
    sizes = torch.tensor([1e-20, 1e-3, 1.0, 5e4])
    heads = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0)) * sizes[:, None, None]
    heads[2, 1] = 0.0
    narrow, scales = to_float8(heads)
    assert (narrow.float().abs().amax(-1)[heads.abs().amax(-1) > 0] == FLOAT8_MAX).all()
    kept = narrow.float() * scales.unsqueeze(-1)
    # Three bits behind the first: half a step is 1 / 16 of an element, or of the least exponent, 2^-6.
    assert ((kept - heads).abs() <= torch.maximum(heads.abs() / 16, scales.unsqueeze(-1) * 2**-10) * 1.0001).all()
    assert (kept[2, 1] == 0).all()
    assert (scales > 0).all()


@pytest.mark.parametrize("window", [None, 50])
def test_attention_reads_what_is_kept(window: int | None) -> None:
    """Blocks of no sequence and scales of no token are NaN, so reading any of them shows."""
    layer = LayerAttention(scale=0.25, window=window)
    case = make_case(
        [1, 20, 1, 300, 3], [40, 0, 17, 5, 130], block_size=16, num_kv_heads=2, group=3, head_dim=24, layer=layer
    )
    case.qkv[:, -1] *= 300.0
    case = of_float8(case)
    key, value = case.key.clone(), case.value.clone()
    out = attend(TorchBackend(case.pool, case.heads), case)
    kept = read_back(case.pool)
    torch.testing.assert_close(out.double(), reference_of(replace(case, pool=kept)), atol=1e-4, rtol=1e-5)
    blocks, offsets = np.divmod(case.batch.slots, 16)
    for plane, heads in ((kept.keys(0), key), (kept.values(0), value)):
        stored = plane[blocks, :, offsets]
        assert ((stored - heads).abs() <= heads.abs().amax(-1, keepdim=True) / 16).all()
        assert int((~plane.isnan()).sum()) == int(case.batch.context_lens.sum()) * 2 * 24


def test_heads_of_sixteen_bits() -> None:
    plain = make_case([1, 9], [30, 4], block_size=16, num_kv_heads=1, group=2, head_dim=16)
    case = of_float8(plain, torch.bfloat16)
    out = attend(TorchBackend(case.pool, case.heads), case)
    assert out.dtype == torch.bfloat16
    wanted = reference_of(replace(case, pool=read_back(case.pool)))
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)


def test_compiled_kernels_leave_it_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    case = of_float8(make_case([1], [3], block_size=16, num_kv_heads=1, group=1, head_dim=16))
    with caplog.at_level(logging.INFO, "coppice.worker"):
        assert type(choose_backend("auto", case.pool, case.heads)) is TorchBackend
    assert "float8" in caplog.text
    with pytest.raises(KernelsUnavailable, match="float8"):
        choose_backend("native", case.pool, case.heads)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_stay_close(family: str, tmp_path: Path) -> None:
    """Within a tenth of the logits' own spread, over a prompt in two chunks and a decode."""
    checkpoint = write_tiny_checkpoint(tmp_path, family)
    plain = TorchExecutor(checkpoint, num_blocks=8, kernels="torch")
    narrow = TorchExecutor(checkpoint, num_blocks=8, kernels="torch", kv_dtype="fp8")
    sequence = DrivenSequence([int(t) for t in np.random.default_rng(1).integers(0, 256, 70)], [3, 1, 6, 0, 7])
    for executor in (plain, narrow):
        executor.execute(build_batch([sequence], [40], 16))
    for _ in range(2):
        sequence.num_computed_tokens = 40 if sequence.num_computed_tokens == 0 else len(sequence.tokens) - 1
        batch = build_batch([sequence], [len(sequence.tokens) - sequence.num_computed_tokens], 16)
        wanted, found = plain.logits(batch), narrow.logits(batch)
        assert 0 < (found - wanted).square().mean().sqrt() < 0.1 * wanted.std()
        sequence.tokens.append(5)


def test_blocks_are_half_as_large_and_never_mixed_with_others(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "llama")
    plain = TorchExecutor(checkpoint, num_blocks=1, dtype="bfloat16", kernels="torch")
    narrow = TorchExecutor(checkpoint, num_blocks=1, dtype="bfloat16", kernels="torch", kv_dtype="fp8")
    assert (plain.namespace.kv_dtype, narrow.namespace.kv_dtype) == ("bfloat16", "fp8_e4m3")
    shape = narrow._pool.shape
    scales = 2 * shape.num_layers * shape.num_kv_heads * 16 * 4
    assert narrow.kv_bytes_per_block() == plain.kv_bytes_per_block() // 2 + scales
    room = suggest_num_blocks(checkpoint, memory_bytes=1 << 20, dtype="bfloat16", kv_dtype="fp8", block_size=16)
    assert room == (1 << 20) // narrow.kv_bytes_per_block()
    with pytest.raises(ValueError, match=r"auto .*, fp8"):
        TorchExecutor(checkpoint, num_blocks=1, kv_dtype="int4")  # type: ignore[arg-type]
