"""`coppice why` names what a request was held up by, where that is known as it was planted."""

from __future__ import annotations

from collections import Counter

import pytest

from coppice_sim.planted import PLANTS, Found, planted


def named(found: list[Found]) -> dict[str, tuple[int, int]]:
    """By plant: how many were named, of how many."""
    counts, right = Counter(one.plant for one in found), Counter(one.plant for one in found if one.is_named)
    return {plant: (right[plant], counts[plant]) for plant in counts}


def test_one_of_each_is_named() -> None:
    found = [planted(seed) for seed in range(len(PLANTS))]
    assert [one.plant for one in found if not one.is_named] == [], found


@pytest.mark.long
def test_of_three_hundred_nearly_all_are_named() -> None:
    found = [planted(seed) for seed in range(300)]
    assert sum(one.is_named for one in found) >= 0.95 * len(found), named(found)
