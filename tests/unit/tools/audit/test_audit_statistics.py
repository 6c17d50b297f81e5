"""The tests of `coppice audit` are wrong as often as they say when nothing differs, and find what differs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coppice_audit.core.statistics import (
    association_p,
    auc,
    auc_interval,
    chi_square_p,
    ks_p,
    mann_whitney_p,
    uniform_p,
)

ROUNDS = 600
ALPHA = 0.05
TwoSamples = Callable[[np.random.Generator, float], float]


def times(random: np.random.Generator, size: int, shift: float = 0.0) -> list[float]:
    """Skewed, as times of answers are."""
    return list(random.gamma(2.0, 5.0, size) + shift)


def words(random: np.random.Generator, size: int, shift: float = 0.0) -> list[str]:
    """Three common words, and ids that never come twice; a shift makes the first word more frequent."""
    shares = np.array([0.3 + shift, 0.3, 0.2 - shift, 0.2])
    return [f"word {kind}" if kind < 3 else random.bytes(8).hex() for kind in random.choice(4, size, p=shares)]


CASES: dict[str, TwoSamples] = {
    "ks": lambda random, shift: ks_p(times(random, 150), times(random, 120, 2 * shift)),
    "mann-whitney": lambda random, shift: mann_whitney_p(times(random, 150), times(random, 120, 2 * shift)),
    "mann-whitney, ties": lambda random, shift: mann_whitney_p(
        [round(value / 5) for value in times(random, 150)],
        [round(value / 5) for value in times(random, 120, 2 * shift)],
    ),
    "association": lambda random, shift: association_p(words(random, 200), words(random, 150, shift / 10)),
    "uniform": lambda random, shift: (
        uniform_p(list(np.where(random.random(150) < shift / 10, 0, random.integers(8, size=150))), 8) or 0.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_wrong_as_often_as_it_says(name: str) -> None:
    random = np.random.default_rng(11)
    found = [CASES[name](random, 0.0) for _ in range(ROUNDS)]
    wrong = sum(p <= ALPHA for p in found) / ROUNDS
    assert 0.5 * ALPHA < wrong < 1.6 * ALPHA, "five deviations of a share of 0.05 in 600 rounds are 0.045"
    assert min(found) > 1e-5


@pytest.mark.parametrize("name", CASES)
def test_it_finds_what_differs(name: str) -> None:
    random = np.random.default_rng(12)
    assert sum(CASES[name](random, 2.0) <= ALPHA for _ in range(50)) >= 45


def test_a_hit_that_is_always_faster_is_beyond_doubt() -> None:
    random = np.random.default_rng(13)
    hits, misses = times(random, 250), times(random, 250, 200.0)
    assert auc(hits, misses) == 1.0
    assert auc(misses, hits) == 0.0
    assert auc_interval(hits, misses, 0.999) == (1.0, 1.0)
    assert ks_p(hits, misses) < 1e-60
    assert mann_whitney_p(hits, misses) < 1e-60
    assert association_p(["yes"] * 250, ["no"] * 250) < 1e-60


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(14)
    held = 0
    for _ in range(ROUNDS):
        low, high = auc_interval(list(random.normal(0, 1, 80)), list(random.normal(0.5, 1, 60)), 0.95)
        held += low < 0.63817 < high  # the share of pairs of these two that are in order
    assert 0.92 < held / ROUNDS < 0.98


def test_the_interval_narrows_with_samples() -> None:
    random = np.random.default_rng(15)
    widths = []
    for size in (200, 2000):
        low, high = auc_interval(times(random, size), times(random, size), 0.999)
        widths.append(high - low)
    assert widths[0] > 2.5 * widths[1]
    assert widths[1] < 0.07, "so that 2000 samples fit between 0.44 and 0.56 when nothing differs"


def test_known_values() -> None:
    """Of printed tables of the chi-square and the Kolmogorov distribution."""
    for statistic, degrees, p in ((3.841, 1, 0.05), (5.991, 2, 0.05), (14.067, 7, 0.05), (24.322, 7, 0.001)):
        assert chi_square_p(statistic, degrees) == pytest.approx(p, rel=2e-3)
    assert chi_square_p(124.342, 100) == pytest.approx(0.05, rel=2e-3)
    assert chi_square_p(0.0, 3) == 1.0
    assert auc([1, 2, 3], [2, 3, 4]) == pytest.approx(7 / 9)
    assert ks_p(list(range(1000)), [value + 60.7 for value in range(1000)]) == pytest.approx(0.05, rel=0.1)


def test_too_little_says_nothing() -> None:
    assert ks_p([], [1.0]) == mann_whitney_p([1.0], []) == association_p([], ["a"]) == 1.0
    assert mann_whitney_p([2.0] * 50, [2.0] * 50) == association_p(["a"] * 50, ["a"] * 50) == 1.0
    assert association_p(["a", "b", "a"], ["b", "b", "c"]) == 1.0, "too rare for the test"
    assert association_p([f"id {n}" for n in range(20)], ["a"] * 50 + ["b"] * 50) < 1.0, "rare words beside common ones"
    assert auc_interval([1.0], [2.0, 3.0], 0.999) == (0.0, 1.0)
    assert uniform_p([0] * 39, 8) is None
    assert uniform_p([0] * 40, 8) is not None
