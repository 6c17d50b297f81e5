"""A sampled token is a function of (seed, position, logits) and settings; and it has the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice_worker.core.batch.choices import uniform_noise
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.torch_sampling import _draw
from coppice_worker.kernels.torch_sampling import choose as sample


def sample_rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
    first_position: int = 0,
) -> SampleRows:
    """Rows that differ in their position only."""
    return SampleRows(
        rows=np.arange(count, dtype=np.int32),
        temperature=np.full(count, temperature, dtype=np.float32),
        top_k=np.full(count, top_k, dtype=np.int32),
        top_p=np.full(count, top_p, dtype=np.float32),
        min_p=np.full(count, min_p, dtype=np.float32),
        seed=np.full(count, seed, dtype=np.uint64),
        position=np.arange(first_position, first_position + count, dtype=np.int64),
    )


def take(rows: SampleRows, order: list[int]) -> SampleRows:
    return SampleRows(
        rows=np.arange(len(order), dtype=np.int32),
        temperature=rows.temperature[order],
        top_k=rows.top_k[order],
        top_p=rows.top_p[order],
        min_p=rows.min_p[order],
        seed=rows.seed[order],
        position=rows.position[order],
    )


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What the filters keep of one row, one token at a time; no equal logits."""
    shares = torch.softmax(logits.double() / temperature, dim=0)
    order = [token for token in logits.argsort(descending=True).tolist() if shares[token] >= min_p * shares.max()]
    order = order[:top_k] if top_k else order
    weights = torch.softmax(logits[order].double() / temperature, dim=0).tolist()
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and top_p < 1.0 and mass >= top_p:
            break
        kept.add(token)
        mass += weight
    return kept


def test_greedy_is_the_argmax_beside_sampled_mates() -> None:
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0))
    rows = sample_rows(9, temperature=5.0)
    rows.temperature[::2] = 0.0
    tokens = sample(logits, rows)
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    assert not torch.equal(tokens[1::2], logits.argmax(-1)[1::2])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 1500))
def test_batch_mates_do_not_matter(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (7, vocab)).astype(np.float32))
    rows = SampleRows(
        rows=np.arange(7, dtype=np.int32),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0], 7).astype(np.float32),
        top_k=rng.choice([0, 1, 5, 300, 5000], 7).astype(np.int32),
        top_p=rng.choice([1.0, 0.99, 0.5, 0.01], 7).astype(np.float32),
        min_p=rng.choice([0.0, 0.001, 0.3, 1.0], 7).astype(np.float32),
        seed=rng.integers(0, 2**64, 7, dtype=np.uint64),
        position=rng.integers(0, 100_000, 7).astype(np.int64),
    )
    together = sample(logits, rows)
    alone = torch.cat([sample(logits[[row]], take(rows, [row])) for row in range(7)])
    order = [int(row) for row in rng.permutation(7)]
    assert torch.equal(together, alone)
    assert torch.equal(together[order], sample(logits[order], take(rows, order)))


def test_frequencies_follow_the_softmax() -> None:
    count, vocab = 10_000, 600
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 2
    logits[300] = float("-inf")
    tokens = sample(logits.expand(count, vocab), sample_rows(count, temperature=0.7))
    seen = torch.bincount(tokens, minlength=vocab).double()
    expected = torch.softmax(logits.double() / 0.7, dim=0) * count
    likely = expected > 20
    # Each count is about Poisson; the sum of squared standard scores has mean n and deviation sqrt(2 n).
    score = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert abs(score - degrees) < 5 * (2 * degrees) ** 0.5
    assert seen[300] == 0


@pytest.mark.parametrize("top_k", [0, 3, 280, pytest.param(400, marks=pytest.mark.wide)])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.9])
@pytest.mark.parametrize(
    ("spread", "vocab", "count"),
    [(0.05, 300, 6_000), (4.0, 600, 3_000), pytest.param(0.05, 600, 12_000, marks=pytest.mark.wide)],
)
def test_filters_keep_exactly_their_tokens(
    top_k: int, top_p: float, min_p: float, spread: float, vocab: int, count: int
) -> None:
    """Spread 0.05 is nearly flat, so that the nucleus is wider than the part looked at first."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * spread
    tokens = sample(logits.expand(count, vocab), sample_rows(count, top_k=top_k, top_p=top_p, min_p=min_p))
    seen = set(tokens.tolist())
    kept = kept_tokens(logits, 1.0, top_k, top_p, min_p)
    assert seen <= kept
    common = {token for token in kept if torch.softmax(logits, 0)[token] * count > 18}
    assert common <= seen


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(1, 1.0, 3.0), (0, 0.0, 3.0), (0, 1.0, 1e-30)])
def test_narrowest_settings_are_greedy(top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(40, 900, generator=torch.Generator().manual_seed(6)) * 50
    rows = sample_rows(40, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(sample(logits, rows), logits.argmax(-1))


def test_equal_logits_are_kept_together() -> None:
    tokens = sample(torch.zeros(400, 8), sample_rows(400, top_k=2, top_p=0.3))
    assert set(tokens.tolist()) == set(range(8))


def test_last_token_is_in_reach() -> None:
    for vocab in (1, 511, 512, 513, 1024):
        logits = torch.full((3, vocab), float("-inf"))
        logits[:, -1] = 0.0
        assert sample(logits, sample_rows(3)).tolist() == [vocab - 1] * 3


def test_noise_at_the_very_end_draws_the_last_token_with_weight() -> None:
    weights = torch.ones(2, 1000)
    weights[1, 700:] = 0.0
    assert _draw(weights, torch.ones(2, dtype=torch.float64)).tolist() == [999, 699]


def test_noise_is_uniform_and_differs_by_seed_and_position() -> None:
    positions = np.arange(50_000, dtype=np.int64)
    noise = uniform_noise(np.full(50_000, 3, dtype=np.uint64), positions)
    other = uniform_noise(np.full(50_000, 4, dtype=np.uint64), positions)
    assert ((noise > 0) & (noise < 1)).all()
    assert np.unique(noise).size == noise.size
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.02
    histogram = np.histogram(noise, bins=50, range=(0, 1))[0]
    assert np.abs(histogram - 1000).max() < 6 * 1000**0.5
    assert uniform_noise(np.array([2**64 - 1], dtype=np.uint64), np.array([2**40]))[0] < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(16, 300, generator=torch.Generator().manual_seed(8)) * 3).to(dtype)
    rows = sample_rows(16, top_p=0.8)
    assert torch.equal(sample(logits, rows), sample(logits.float(), rows))
