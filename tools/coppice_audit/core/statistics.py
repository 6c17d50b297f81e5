"""Tests and intervals for two samples, for a table and for places, on numpy alone. All functions are pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

EXPECTED_MIN = 5.0  # of a cell of a table, so that its chi-square is near enough to the exact test


def ks_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov test, p of the asymptotic distribution with Stephens' correction.

    Ties make it conservative. 1.0 when a sample is empty.
    """
    if not len(first) or not len(second):
        return 1.0
    a, b = np.sort(np.asarray(first, float)), np.sort(np.asarray(second, float))
    at = np.concatenate([a, b])
    shares_a, shares_b = (np.searchsorted(one, at, side="right") / len(one) for one in (a, b))
    distance = float(np.abs(shares_a - shares_b).max())
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series below does not converge there, and its sum is 1 to twelve digits
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))


def auc(lower: Sequence[float], higher: Sequence[float]) -> float:
    """The share of pairs in which the value of `lower` is the lower one, ties as half: 0.5 where nothing differs."""
    return float(np.mean(_shares_above(lower, higher)))


def auc_interval(lower: Sequence[float], higher: Sequence[float], level: float) -> tuple[float, float]:
    """Confidence interval of `auc` by DeLong's variance, clipped to 0 and 1; all of it with fewer than two values."""
    if len(lower) < 2 or len(higher) < 2:
        return 0.0, 1.0
    of_lower, of_higher = _shares_above(lower, higher), 1.0 - _shares_above(higher, lower)
    deviation = math.sqrt(float(of_lower.var(ddof=1)) / len(lower) + float(of_higher.var(ddof=1)) / len(higher))
    centre, half = float(of_lower.mean()), NormalDist().inv_cdf((1 + level) / 2) * deviation
    return max(0.0, centre - half), min(1.0, centre + half)


def _shares_above(values: Sequence[float], others: Sequence[float]) -> Floats:
    """For each value, the share of `others` that is above it, equal ones as half."""
    ordered, asked = np.sort(np.asarray(others, float)), np.asarray(values, float)
    below, up_to = (np.searchsorted(ordered, asked, side=side) for side in ("left", "right"))
    shares: Floats = 1.0 - (below + up_to) / (2.0 * len(ordered))
    return shares


def mann_whitney_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank test of two samples, normal approximation with ties; 1.0 when a sample is empty or all values are equal."""
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    _, counts = np.unique(np.concatenate([np.asarray(first, float), np.asarray(second, float)]), return_counts=True)
    total = n + m
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (total * (total - 1.0))
    variance = n * m / 12.0 * (total + 1.0 - ties)
    if variance <= 0:
        return 1.0
    return math.erfc(abs(auc(first, second) - 0.5) * n * m / math.sqrt(2 * variance))


def association_p(first: Sequence[str], second: Sequence[str]) -> float:
    """Whether two samples of words differ, by chi-square. Words that are too rare for it count as one word."""
    if not first or not second:
        return 1.0
    rows = Counter(first), Counter(second)
    least = EXPECTED_MIN * (len(first) + len(second)) / min(len(first), len(second))
    common = [word for word, count in (rows[0] + rows[1]).items() if count >= least]
    rest = [len(one) - sum(row[word] for word in common) for one, row in zip((first, second), rows, strict=True)]
    table = [[row[word] for word in common] for row in rows]
    if sum(rest) >= least or not common:
        table = [[*counts, more] for counts, more in zip(table, rest, strict=True)]
    else:
        for counts, more in zip(table, rest, strict=True):
            counts[0] += more
    cells = np.asarray(table, float)
    if cells.shape[1] < 2:
        return 1.0
    expected = cells.sum(axis=1, keepdims=True) * cells.sum(axis=0, keepdims=True) / cells.sum()
    return chi_square_p(float(((cells - expected) ** 2 / expected).sum()), cells.shape[1] - 1)


def uniform_p(places: Sequence[int], num_places: int) -> float | None:
    """Whether places from 0 to `num_places` - 1 come equally often, by chi-square. None with too few to say."""
    expected = len(places) / num_places
    if expected < EXPECTED_MIN:
        return None
    counts = np.bincount(np.asarray(places), minlength=num_places)
    return chi_square_p(float(((counts - expected) ** 2 / expected).sum()), num_places - 1)


def chi_square_p(statistic: float, degrees: int) -> float:
    """Probability of at least `statistic`, by the closed form that whole degrees of freedom have."""
    half = statistic / 2
    if half <= 0:
        return 1.0
    offset = degrees % 2 / 2
    sum_of_terms = math.fsum(
        math.exp(-half + (k + offset) * math.log(half) - math.lgamma(k + offset + 1)) for k in range(degrees // 2)
    )
    return min(1.0, sum_of_terms + (math.erfc(math.sqrt(half)) if degrees % 2 else 0.0))
