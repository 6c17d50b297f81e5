"""How many programs fit beside each other, and that a device is given as many as its compiler left room for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.triton import residency
from coppice_worker.kernels.triton.attention import resident
from coppice_worker.kernels.triton.attention.arrays import decode_scratch
from coppice_worker.kernels.triton.attention.resident import resident_programs
from coppice_worker.kernels.triton.residency import DecodePrograms, Multiprocessor, programs_beside

CPU = torch.device("cpu")
READ = DecodePrograms(7, 5)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "programs"),
    [
        (118, 104 * 1024, 4, 2),  # shared memory
        (255, 16 * 1024, 4, 2),  # registers
        (129, 16 * 1024, 4, 3),  # rounded up to 136
        (128, 16 * 1024, 4, 4),
        (16, 0, 1, 32),  # a multiprocessor holds no more
        (16, 0, 8, 8),  # threads
    ],
)
def test_what_limits_programs(registers: int, shared_bytes: int, num_warps: int, programs: int) -> None:
    assert programs_beside(registers, shared_bytes, num_warps) == programs


def kernel(registers: int | None) -> Any:
    metadata = SimpleNamespace(shared=16 * 1024, num_warps=4)
    return (
        SimpleNamespace(metadata=metadata)
        if registers is None
        else SimpleNamespace(n_regs=registers, metadata=metadata)
    )


WINDOWED = (LayerAttention(scale=1.0, window=64), LayerAttention(scale=1.0))


def found(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[[bool, LayerAttention], Any], num_heads: int = 8
) -> DecodePrograms:
    """With kernels that `compiled` gives, by whether they are over what rows have in common, and the layer."""
    monkeypatch.setattr(resident, "plan", lambda *_: None)
    monkeypatch.setattr(resident, "attend_spans", lambda *args: compiled(args[5] is not None, args[4]))
    monkeypatch.setattr(residency, "multiprocessor_of", lambda _: Multiprocessor())
    heads = Heads(num_heads, WINDOWED)
    pool = KvPool(KvShape(2, 2, 16), num_blocks=1, block_size=16, device=CPU, dtype=torch.bfloat16)
    scratch = decode_scratch(1, heads, pool.shape, per_sm=READ, num_sms=1, device=CPU)
    return resident_programs(pool, heads, scratch, READ)


def test_the_layer_with_the_fewest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(is_shared: bool, layer: LayerAttention) -> Any:
        assert not (is_shared and layer.window), "layers with a window share nothing"
        return kernel(233 if is_shared else (168 if layer.window else 128))

    assert found(monkeypatch, compiled) == (3, 2)


def test_what_says_nothing_is_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, lambda is_shared, layer: kernel(128 if is_shared else None)) == (READ.own, 4)
    assert found(monkeypatch, lambda is_shared, layer: None) == READ


def test_a_group_too_large_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(is_shared: bool, layer: LayerAttention) -> Any:
        assert not is_shared
        return kernel(128)

    assert found(monkeypatch, compiled, num_heads=64) == (4, READ.shared)
