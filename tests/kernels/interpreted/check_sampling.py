"""Tokens chosen without sorting are those that plain torch chooses, which sorts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels import torch_sampling
from coppice_worker.kernels.triton import launch, sampling
from coppice_worker.kernels.triton.sampling import argmax, choose

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

Rng = np.random.Generator


def spread(scale: float) -> Callable[[Rng, int, int], np.ndarray]:
    return lambda rng, rows, vocab: rng.normal(0, scale, (rows, vocab))


def with_ties(rng: Rng, rows: int, vocab: int) -> np.ndarray:
    """As bfloat16 logits are: few values, each of many tokens."""
    return rng.integers(-3, 4, (rows, vocab)) / 2


def forbidden(rng: Rng, rows: int, vocab: int) -> np.ndarray:
    """Only some 5 tokens are left."""
    return np.where(rng.random((rows, vocab)) < 5 / vocab, rng.normal(0, 2, (rows, vocab)), -np.inf)


def close_together(rng: Rng, rows: int, vocab: int) -> np.ndarray:
    """Neighbours in float32, many of which a division by the temperature makes equal."""
    return np.float32(8) + np.spacing(np.float32(8)) * rng.integers(0, 50, (rows, vocab))


def peaked(rng: Rng, rows: int, vocab: int) -> np.ndarray:
    """Almost all mass on one token; the least of the others underflow."""
    logits = rng.normal(0, 40, (rows, vocab))
    logits[:, vocab // 3] = 150
    return logits


LOGITS = [spread(0.05), spread(4.0), with_ties, forbidden, close_together, peaked]


def some_rows(seed: int, **columns: list[float]) -> SampleRows:
    """As many as the columns are long; what is not named filters nothing."""
    count = len(next(iter(columns.values())))
    rng = np.random.default_rng(seed)

    def column(name: str, otherwise: float, dtype: type) -> np.ndarray:
        return np.array(columns.get(name, [otherwise] * count), dtype)

    return SampleRows(
        rows=np.arange(count, dtype=np.int32),
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        position=rng.integers(0, 100_000, count).astype(np.int64),
    )


def check(logits: torch.Tensor, rows: SampleRows) -> None:
    wanted = torch_sampling.choose(logits, rows)
    assert torch.equal(choose(logits, rows), wanted)


# A row takes some tenth of a second here, so each filters in another way.
@pytest.mark.parametrize("kind", range(len(LOGITS)))
def test_same_tokens_as_torch(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "VOCAB_TILE", 128)
    # The last columns are another's, and rows are strided.
    wide = torch.from_numpy(LOGITS[kind](np.random.default_rng(kind), 4, 303).astype(np.float32))
    wide[:, 300:] = 1000.0
    wide[:, 150] = 0.5
    before = wide.clone()
    check(
        wide[:, :300],
        some_rows(kind, temperature=[1.0, 1.7, 0.3, 0.0], top_k=[40, 0, 5, 7], top_p=[1.0, 0.9, 0.6, 0.5]),
    )
    assert torch.equal(wide, before)


def test_narrowest_settings() -> None:
    logits = torch.from_numpy(with_ties(np.random.default_rng(1), 5, 60).astype(np.float32))
    columns = {"top_k": [1, 60, 0, 0, 0], "top_p": [1.0, 1e-6, 0.0, 1.0, 1.0], "min_p": [0.0, 0.0, 0.0, 1.0, 0.3]}
    check(logits, some_rows(2, **columns, temperature=[1.0, 1.0, 1.0, 1.0, 1e-30]))
    check(torch.full((1, 1), 3.0), some_rows(3, top_p=[0.5]))


def test_wide_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes know only the largest of several that are wanted, so the search has to go on over the row."""
    monkeypatch.setattr(launch, "VOCAB_TILE", 128)
    logits = torch.linspace(0, 3, 600).repeat(3, 1)[:, torch.randperm(600, generator=torch.Generator().manual_seed(2))]
    check(logits, some_rows(4, top_p=[0.97, 1.0, 0.8], top_k=[0, 333, 500], min_p=[0.0, 0.1, 0.0]))


def test_first_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "VOCAB_TILE", 128)
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(1))
    logits[0] = -3.0
    logits[1] = float("-inf")
    logits[2, 300] = logits[2, 650] = float("nan")
    logits.view(torch.int32)[7, 400] = -0x400000  # a NaN with a sign
    logits[3, 699] = float("inf")
    logits[4] = float("-inf")
    logits[4, 500] = -3e38
    logits[5] = -1.0
    logits[5, 200], logits[5, 600] = -0.0, 0.0
    logits[6, 130] = logits[6, 2 + 128 * 3] = 50.0
    assert torch.equal(argmax(logits), torch_sampling.first_argmax(logits))


@triton.jit
def search_kernel(keys_ptr, cuts_ptr, vocab, cut, wanted, BY_MASS: tl.constexpr, TILE: tl.constexpr):  # noqa: N803
    tl.store(cuts_ptr, sampling._search(keys_ptr, vocab, cut, wanted, BY_MASS, TILE))


def worths(keys: torch.Tensor, by_mass: bool) -> torch.Tensor:
    return torch.exp(-keys.view(torch.float32).double()) if by_mass else torch.ones(len(keys))


@pytest.mark.parametrize("by_mass", [False, True])
def test_a_search_ends_at_the_smallest_key(by_mass: bool) -> None:
    """From one key too far, where the first look finds it, and from far off; among many keys and few."""
    rng = np.random.default_rng(0)
    # The last two have neighbours: one behind the second place that is looked at, one between the two.
    behind, between = (
        np.float32([0, value, np.nextafter(value, np.float32(9)), 7]) for value in np.float32([2, 1e-20])
    )
    for values in (rng.uniform(0, 9, 50), rng.integers(0, 5, 50), behind, between):
        keys = torch.from_numpy(values.astype(np.float32)).view(torch.int32)
        ordered = keys.sort().values
        worth = worths(ordered, by_mass)
        for index in (1, len(keys) // 2):
            # Of a mass, one that ends in the middle of a key's own, as it is rounded on its way.
            wanted = float(worth[: index + 1].sum() - worth[index] / 2) if by_mass else index + 1
            found, next_key = int(ordered[index]), int(ordered[index:].unique()[:2][-1])
            for cut in (next_key, 0x7F800000):
                cuts = torch.zeros(1, dtype=torch.int32)
                search_kernel[(1,)](keys, cuts, len(keys), cut, wanted, BY_MASS=by_mass, TILE=32)
                assert int(cuts) == found


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_without_any_weight_still_gives_a_token() -> None:
    logits = torch.full((2, 300), float("-inf"))
    logits[1] = float("nan")
    rows = some_rows(5, top_p=[0.5, 1.0], top_k=[3, 0])
    tokens = choose(logits, rows)
    assert ((tokens >= 0) & (tokens < 300)).all()
