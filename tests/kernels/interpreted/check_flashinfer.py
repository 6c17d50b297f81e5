"""Steps with chunks by FlashInfer's seam, on a stand-in for it, against the reference; what it cannot do by Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.triton.flashinfer import FlashInferBackend, unsupported
from tests.fakes.worker.flashinfer import FakePagedAttention
from tests.kernels.cases import Case, assert_exact, make_case

MIXED = ([1, 20, 1, 7, 33], [40, 13, 15, 16, 0])


def fakes(backend: FlashInferBackend) -> list[Any]:
    return list(backend.attentions.values())


@pytest.mark.parametrize(
    "layer",
    [
        LayerAttention(scale=0.2),
        LayerAttention(scale=0.2, window=9),
        LayerAttention(scale=0.2, window=1, soft_cap=1.5),
    ],
    ids=["plain", "window", "cap"],
)
def test_all_rows_of_a_step_with_chunks(layer: LayerAttention) -> None:
    case = make_case(*MIXED, block_size=16, num_kv_heads=2, group=3, head_dim=64, layer=layer)
    backend = FlashInferBackend(case.pool, case.heads, FakePagedAttention)
    assert_exact(backend, case)
    assert [(fake.num_plans, fake.num_runs) for fake in fakes(backend)] == [(1, 1)]


@pytest.mark.parametrize(
    ("new", "before", "sinks"), [([1, 1, 1], [40, 13, 15], None), (*MIXED, torch.tensor([0.3, -1.0, 2.0, 0.0]))]
)
def test_decodes_and_layers_with_sinks_are_not_its(
    new: list[int], before: list[int], sinks: torch.Tensor | None
) -> None:
    layer = LayerAttention(scale=0.2, sinks=sinks)
    case: Case = make_case(new, before, block_size=16, num_kv_heads=2, group=2, head_dim=64, layer=layer)
    backend = FlashInferBackend(case.pool, case.heads, FakePagedAttention)
    assert_exact(backend, case)
    assert not any(fake.num_plans or fake.num_runs for fake in fakes(backend))


def test_pools_that_it_cannot_read_are_named() -> None:
    def pool(head_dim: int, dtype: torch.dtype) -> KvPool:
        return KvPool(KvShape(1, 1, head_dim), num_blocks=1, block_size=16, device=torch.device("cpu"), dtype=dtype)

    assert unsupported(pool(128, torch.bfloat16)) is None
    assert "96 columns" in str(unsupported(pool(96, torch.bfloat16)))
    assert "scale for each token" in str(unsupported(pool(128, torch.float8_e4m3fn)))
