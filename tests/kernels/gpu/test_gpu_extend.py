"""Chunks on a real device, in its own types, against the reference on what these types hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from tests.kernels.cases import Case, attend, make_case, reference_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Weights and the output are rounded to the type: half a step each of values around 1. float8 is computed in float16,
# to which queries are rounded once more. In float32 it is the scores: of 256 columns they are around 10 and 1e-6 off.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def on_device(case: Case, dtype: torch.dtype, kept: torch.dtype) -> tuple[Case, Case]:
    """The step on the device, its blocks filled; and in float32 here, of the same rounded numbers."""
    shape, num_blocks, block_size = case.pool.shape, case.pool.num_blocks, case.pool.block_size

    def pool(device: str, kind: torch.dtype) -> KvPool:
        return KvPool(shape, num_blocks=num_blocks, block_size=block_size, device=torch.device(device), dtype=kind)

    rounded = replace(case, qkv=case.qkv.to(dtype).float())
    there, here = pool("cuda", kept), pool("cpu", torch.float32)
    slots = case.batch.slots
    contents = case.pool.storage.clone()
    for plane, heads in enumerate((rounded.key, rounded.value)):
        contents[0, plane, slots // block_size, :, slots % block_size] = heads
    if there.scales is None:
        there.storage.copy_(contents)
        here.storage.copy_(there.storage)
    else:
        scales = (contents.abs().amax(-1) / FLOAT8_MAX).clamp(min=1e-30)
        there.scales.copy_(scales)
        there.storage.copy_((contents / scales[..., None]).to(kept))
        here.storage.copy_(there.storage.float().cpu() * scales[..., None])
    return replace(case, pool=there, qkv=rounded.qkv.to("cuda", dtype)), replace(rounded, pool=here)


def assert_close(
    case: Case, dtype: torch.dtype, kept: torch.dtype | None = None, *, num_sms: int = 1, in_pieces: bool = False
) -> None:
    from coppice_worker.kernels.triton.attention.arrays import step_arrays
    from coppice_worker.kernels.triton.attention.extend import extend
    from coppice_worker.kernels.upload import Upload

    there, here = on_device(case, dtype, kept or dtype)
    heads = there.pool.shape.num_kv_heads
    arrays = step_arrays(
        there.batch,
        num_kv_heads=heads,
        group=there.num_heads // heads,
        head_dim=there.pool.shape.head_dim,
        block_size=there.pool.block_size,
        upload=Upload(torch.device("cuda")),
        num_sms=num_sms,
    )
    assert (arrays.extend_pieces is not None) == in_pieces
    layer = there.layer
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.cuda())
    out = torch.full(there.query.shape, float("nan"), dtype=dtype, device="cuda")
    extend(there.query, there.pool.layer(0), arrays, layer, out)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), reference_of(here), atol=tolerance, rtol=tolerance)


NEW, BEFORE = [300, 2, 17, 129], [700, 1500, 0, 63]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "block_size", "head_dim"),
    [(1, 8, 16, 64), (4, 2, 16, 128), (7, 2, 64, 128), (3, 1, 32, 80), (6, 1, 16, 96), (2, 2, 64, 256), (7, 2, 16, 24)],
)
def test_shapes(dtype: torch.dtype, group: int, num_kv_heads: int, block_size: int, head_dim: int) -> None:
    case = make_case(NEW, BEFORE, block_size=block_size, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    assert_close(case, dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 1, 100, 1024])
def test_ways_of_attending(head_dim: int, kept: torch.dtype | None, window: int | None) -> None:
    layer = LayerAttention(scale=0.2, window=window, soft_cap=20.0, sinks=torch.linspace(-2, 3, 8))
    case = make_case(NEW, BEFORE, block_size=16, num_kv_heads=2, group=4, head_dim=head_dim, layer=layer)
    assert_close(case, torch.bfloat16, kept)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_float8_blocks(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(NEW, BEFORE, block_size=64, num_kv_heads=2, group=4, head_dim=head_dim)
    assert_close(case, dtype, torch.float8_e4m3fn)


def test_a_chunk_after_a_long_context() -> None:
    """Many tiles in a row: what a copy behind the arithmetic would bring too late is seen here."""
    case = make_case([1000], [20_000], block_size=16, num_kv_heads=2, group=4, head_dim=128)
    assert_close(case, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, None), (torch.float32, None), (torch.float16, torch.float8_e4m3fn)]
)
def test_few_chunks_in_pieces(head_dim: int, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    layer = LayerAttention(scale=0.2, sinks=torch.linspace(-2, 3, 8))
    case = make_case([70, 3], [9000, 20], block_size=16, num_kv_heads=2, group=4, head_dim=head_dim, layer=layer)
    assert_close(case, dtype, kept, num_sms=132, in_pieces=True)


@pytest.mark.parametrize("window", [None, 100])
def test_flashinfer_finds_what_triton_finds(window: int | None) -> None:
    """Where it is installed."""
    flashinfer = pytest.importorskip("flashinfer")
    from coppice_worker.kernels.triton.flashinfer import FlashInferBackend

    layer = LayerAttention(scale=0.1, window=window)
    case = make_case(
        [1, 700, 1, 60], [900, 33, 0, 500], block_size=16, num_kv_heads=2, group=4, head_dim=128, layer=layer
    )
    there, here = on_device(case, torch.bfloat16, torch.bfloat16)
    there.pool.storage.nan_to_num_()  # as pools begin
    backend = FlashInferBackend(there.pool, there.heads, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    found = attend(backend, there).float().cpu()
    torch.testing.assert_close(found.double(), reference_of(here), atol=TOLERANCES[torch.bfloat16], rtol=1.6e-2)
