"""Decode on a real device, against the reference: all ways of attending, odd shapes, float8, prefixes, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, KvPool
from tests.kernels.cases import Case, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [0, 1, 62, 63, 64, 500, 1500, 4096, 9000]
# Outputs are averages of unit normals. Weights and outputs are rounded once, to 8 or 11 bits.
TOLERANCES = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LAYERS = {
    "plain": LayerAttention(scale=0.125),
    "windowed": LayerAttention(scale=0.125, window=200),
    "capped": LayerAttention(scale=1.0, soft_cap=3.0),
    "sinks": LayerAttention(scale=0.125, sinks=torch.linspace(-3, 6, 8)),
    "all": LayerAttention(scale=0.5, window=65, soft_cap=2.0, sinks=torch.linspace(-3, 6, 8)),
}


def decodes(
    before: list[int], *, group: int, num_kv_heads: int, head_dim: int, block_size: int, **others: object
) -> Case:
    """A case with its new tokens in the pool already."""
    shape = {"group": group, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = make_case([1] * len(before), before, **shape, **others)  # type: ignore[arg-type]
    slots = torch.from_numpy(case.batch.slots)
    reference.write_kv(case.pool.keys(0), case.key, slots)
    reference.write_kv(case.pool.values(0), case.value, slots)
    return case


def moved(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> Case:
    """To the device, rounded; the case keeps what that leaves of its numbers, in float32."""
    pool = KvPool(
        case.pool.shape,
        num_blocks=case.pool.num_blocks,
        block_size=case.pool.block_size,
        device=torch.device("cuda"),
        dtype=kv_dtype,
    )
    storage = case.pool.storage.cuda()
    if pool.scales is not None:
        pool.scales.copy_(storage.abs().amax(-1) / FLOAT8_MAX)
        pool.storage.copy_(storage / pool.scales[..., None])
        case.pool.storage.copy_(pool.storage.float() * pool.scales[..., None])
    else:
        pool.storage.copy_(storage)
        case.pool.storage.copy_(pool.storage)
    sinks = None if case.layer.sinks is None else case.layer.sinks.cuda()
    on_device = Case(pool, case.batch, case.qkv.to("cuda", dtype), replace(case.layer, sinks=sinks))
    case.qkv.copy_(on_device.qkv)
    return on_device


def wanted(case: Case) -> torch.Tensor:
    batch = case.batch
    lengths = [torch.from_numpy(array) for array in (batch.block_tables, batch.context_lens, batch.query_starts)]
    return reference.attend(case.layer, case.query, case.pool.keys(0), case.pool.values(0), *lengths)


def attend(case: Case) -> torch.Tensor:
    from coppice_worker.kernels.triton.backend import TritonBackend

    step = TritonBackend(case.pool, case.heads).plan(case.batch)
    return step.attend(0, case.query).view(case.query.shape)


def check(case: Case, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    out = attend(moved(case, dtype, kv_dtype))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), wanted(case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", ["same", "float8"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_ways_of_attending(layer: LayerAttention, kv_dtype: str, dtype: torch.dtype) -> None:
    case = decodes(LENGTHS, group=4, num_kv_heads=2, head_dim=128, block_size=16, layer=layer)
    check(case, dtype, torch.float8_e4m3fn if kv_dtype == "float8" else dtype)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("group", "num_kv_heads"), [(7, 2), (1, 6), (8, 1), (32, 1)])
def test_shapes(group: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype) -> None:
    before = [0, 63, 130, 700]
    case = decodes(before, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    check(case, torch.bfloat16, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_common_prefixes(head_dim: int, kv_dtype: torch.dtype) -> None:
    """Twenty rows of one prompt: three groups of a tile, each with contexts of its own behind it."""
    case = decodes([2100 + 37 * i for i in range(20)], group=4, num_kv_heads=2, head_dim=head_dim, block_size=16)
    tables = case.batch.block_tables
    case.pool.storage[:, :, tables[1:, :128].reshape(-1)] = float("nan")
    tables[1:, :128] = tables[0, :128]
    check(case, torch.bfloat16, kv_dtype)


def test_a_graph_is_replayed_with_other_lengths() -> None:
    from coppice_worker.kernels.triton.attention.arrays import StepArrays, decode_scratch
    from coppice_worker.kernels.triton.attention.decode import decode
    from coppice_worker.kernels.triton.attention.split_kv import plan
    from coppice_worker.kernels.triton.residency import read_programs

    shape = {"group": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 16}
    cases = [decodes(before, **shape) for before in ([900, 40, 3000, 7], [20, 5000], [64])]  # type: ignore[arg-type]
    moves = [moved(case, torch.bfloat16, torch.bfloat16) for case in cases]
    pool = KvPool(
        cases[0].pool.shape,
        num_blocks=max(case.pool.num_blocks for case in cases),
        block_size=16,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    width = max(case.batch.block_tables.shape[1] for case in cases)
    tables = torch.zeros((4, width), dtype=torch.int32, device="cuda")
    lens = torch.ones(4, dtype=torch.int32, device="cuda")
    starts = torch.arange(5, dtype=torch.int32, device="cuda")
    none = starts[:0]
    arrays = StepArrays(lens.long(), tables, lens, starts, none, none, True, None)
    scratch = decode_scratch(
        4,
        moves[0].heads,
        pool.shape,
        per_sm=read_programs(pool.shape.head_dim, has_float8=False),
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        device=pool.storage.device,
    )
    query = torch.zeros((4, 8, 128), dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(query)

    def step() -> None:
        plan(arrays, scratch, 2)
        decode(query, pool.layer(0), arrays, scratch, cases[0].layer, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case, move in zip(cases, moves, strict=True):
        rows = len(case.batch.context_lens)
        pool.storage.fill_(float("nan"))
        pool.storage[:, :, : case.pool.num_blocks] = move.pool.storage
        tables.fill_(1 << 30)
        tables[:rows, : case.batch.block_tables.shape[1]] = torch.from_numpy(case.batch.block_tables).cuda()
        lens.zero_()
        lens[:rows] = torch.from_numpy(case.batch.context_lens).cuda()
        query.fill_(float("nan"))
        query[:rows] = move.query
        out.fill_(7)
        graph.replay()
        torch.testing.assert_close(out[:rows].cpu().double(), wanted(case), atol=1.6e-2, rtol=1.6e-2)
        assert (out[rows:] == 7).all()


def test_the_same_step_gives_the_same_bits() -> None:
    case = moved(decodes(LENGTHS, group=4, num_kv_heads=2, head_dim=128, block_size=16), torch.bfloat16, torch.bfloat16)
    assert torch.equal(attend(case), attend(case))
