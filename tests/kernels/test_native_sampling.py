"""The compiled sampler takes the tokens that plain torch takes."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from coppice_worker.core.batch import SampleRows
from coppice_worker.core.choices import uniform_noise
from coppice_worker.kernels.native.arithmetic import NativeArithmetic
from coppice_worker.kernels.native.library import load
from coppice_worker.kernels.native.sampling import NativeSampler
from coppice_worker.kernels.torch_sampling import choose

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler here"),
]
ROWS = 7


def mixed_rows(rng: np.random.Generator) -> SampleRows:
    return SampleRows(
        rows=np.arange(ROWS, dtype=np.int32),
        temperature=rng.choice([0.1, 0.7, 1.0, 3.0], ROWS).astype(np.float32),
        top_k=rng.choice([0, 1, 5, 300, 5000], ROWS).astype(np.int32),
        top_p=rng.choice([1.0, 0.99, 0.9, 0.5, 0.01], ROWS).astype(np.float32),
        min_p=rng.choice([0.0, 0.001, 0.3, 1.0], ROWS).astype(np.float32),
        seed=rng.integers(0, 2**64, ROWS, dtype=np.uint64),
        position=rng.integers(0, 10**6, ROWS).astype(np.int64),
    )


def random_logits(rng: np.random.Generator, seed: int) -> torch.Tensor:
    """Flat and steep ones, many equal, some impossible, of every kind of length."""
    vocab, spread = int(rng.choice([1, 2, 15, 16, 17, 511, 512, 513, 3000])), float(rng.choice([0.01, 1, 4, 20]))
    logits = torch.from_numpy(rng.normal(0, spread, (ROWS, vocab)).astype(np.float32))
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2
    if seed % 4 == 0 and vocab > 1:
        logits[:, rng.integers(0, vocab, vocab // 2)] = float("-inf")
        logits[:, rng.integers(0, vocab)] = 0.0
    return logits.bfloat16() if seed % 5 == 0 else logits


def draw(logits: torch.Tensor, rows: SampleRows, drawn: np.ndarray) -> torch.Tensor:
    noise = uniform_noise(rows.seed[drawn], rows.position[drawn])
    return NativeSampler().draw(logits, rows, drawn, noise)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, rows = random_logits(rng, seed), mixed_rows(rng)
    wanted = choose(logits.clone(), rows)
    assert torch.equal(draw(logits, rows, np.arange(ROWS)), wanted)
    some = np.array([5, 0, 3])
    assert torch.equal(draw(logits, rows, some), wanted[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_beside_drawn_ones(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    logits, rows = torch.from_numpy(rng.normal(0, 3, (ROWS, 900))).to(dtype), mixed_rows(rng)
    arithmetic = NativeArithmetic(load(dtype, 64))
    for greedy in ([1, 4], [], list(range(ROWS))):
        rows.temperature[:] = 0.8
        rows.temperature[greedy] = 0.0
        assert torch.equal(arithmetic.choose(logits, rows), choose(logits, rows))


def test_threads_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    logits, rows = torch.from_numpy(rng.normal(0, 3, (ROWS, 5000)).astype(np.float32)), mixed_rows(rng)
    together = draw(logits, rows, np.arange(ROWS))
    torch.set_num_threads(1)
    assert torch.equal(draw(logits, rows, np.arange(ROWS)), together)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_gives_some_token(value: float) -> None:
    """Whatever a broken model says, no memory is touched that is not the row's."""
    rng = np.random.default_rng(1)
    tokens = draw(torch.full((ROWS, 700), value), mixed_rows(rng), np.arange(ROWS))
    assert bool(((tokens >= 0) & (tokens < 700)).all())
