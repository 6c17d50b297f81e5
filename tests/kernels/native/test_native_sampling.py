"""The compiled sampler takes the tokens that plain torch takes."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels import torch_sampling
from coppice_worker.kernels.native.arithmetic import NativeArithmetic
from coppice_worker.kernels.native.library import load

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


def choose(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    return NativeArithmetic(load(torch.float32, 16)).choose(logits, rows)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, rows = random_logits(rng, seed), mixed_rows(rng)
    assert torch.equal(choose(logits, rows), torch_sampling.choose(logits.clone(), rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("greedy", [[0, 3], [], list(range(ROWS))])
def test_greedy_rows_beside_drawn_ones(dtype: torch.dtype, greedy: list[int]) -> None:
    rng = np.random.default_rng(3)
    logits, rows = torch.from_numpy(rng.normal(0, 1, (ROWS, 600))).to(dtype), mixed_rows(rng)
    rows.temperature[greedy] = 0.0
    found = choose(logits, rows)
    assert torch.equal(found, torch_sampling.choose(logits.clone(), rows))
    assert torch.equal(found[greedy], torch_sampling.first_argmax(logits)[greedy])


def test_threads_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    logits, rows = torch.from_numpy(rng.normal(0, 3, (ROWS, 5000)).astype(np.float32)), mixed_rows(rng)
    together = choose(logits, rows)
    torch.set_num_threads(1)
    assert torch.equal(choose(logits, rows), together)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_gives_some_token(value: float) -> None:
    """Whatever a broken model says, no memory is touched that is not the row's."""
    tokens = choose(torch.full((ROWS, 700), value), mixed_rows(np.random.default_rng(1)))
    assert bool(((tokens >= 0) & (tokens < 700)).all())
