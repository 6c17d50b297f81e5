"""Non-interference of whole runs: what a tenant hears does not depend on what others send, nor, if it is strict, on
whether they are there."""

from __future__ import annotations

import pytest

from coppice_sim.mutants import leaks
from coppice_sim.mutants.registry import Mutant
from coppice_sim.two_worlds import Comparison, compare, compare_alone, domains_of

STEPS = 1_000
FEW_STEPS = 500  # of many seeds
BATCH = (pytest.mark.long, pytest.mark.batch)
ROUNDS = 4
SEEDS = [
    range(3, 11),
    *(pytest.param(range(n, n + 30), marks=pytest.mark.wide) for n in range(100, 280, 30)),
    *(pytest.param(range(n, n + 250), marks=BATCH) for n in range(1_000, 14_000, 250)),
]
STRICT_SEEDS = [
    range(12, 13),
    *(pytest.param(range(n, n + 25), marks=pytest.mark.wide) for n in (100, 125)),
    *(pytest.param(range(n, n + 50), marks=BATCH) for n in range(200, 1_200, 50)),
]


def compared(seed: int, steps: int = STEPS) -> Comparison | None:
    """None: the seed has one tenant."""
    domains = domains_of(seed)
    return compare(seed, domains[seed % len(domains)], steps=steps) if len(domains) > 1 else None


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_tenant_hears_the_same_whatever_others_prompts_say(seeds: range) -> None:
    steps = STEPS if len(seeds) < 100 else FEW_STEPS
    found = {seed: one for seed in seeds if (one := compared(seed, steps)) is not None}
    assert {seed: one.difference for seed, one in found.items() if one.difference} == {}
    assert len(found) > len(seeds) // 2
    num_heard = sum(one.num_heard for one in found.values())
    assert num_heard > steps // 50 * len(found), "they would be equal if nobody heard a word"


@pytest.mark.parametrize("seeds", STRICT_SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_strict_tenant_hears_the_same_without_the_others(seeds: range) -> None:
    found = {seed: one for seed in seeds if (one := compare_alone(seed, num_rounds=ROUNDS)) is not None}
    assert {seed: one.difference for seed, one in found.items() if one.difference} == {}
    assert found


@pytest.mark.parametrize("seed", [40, *(pytest.param(n, marks=pytest.mark.wide) for n in (47, 51, 53, 67, 75, 80))])
def test_a_strict_tenant_hears_the_same_without_the_others_at_two_schedulers(seed: int) -> None:
    compared = compare_alone(seed, num_rounds=ROUNDS, num_schedulers=2)
    assert compared is not None
    assert (compared.num_heard, compared.difference) == (24, "")


# --- the comparisons can fail


@pytest.mark.parametrize("mutant", leaks.CONTENT, ids=lambda mutant: mutant.name)
def test_a_leak_of_content_is_heard(mutant: Mutant) -> None:
    with mutant.applied():
        assert any((one := compared(seed)) is not None and one.difference for seed in (8, 5, 32, 3))


@pytest.mark.parametrize(
    ("mutant", "seeds"),
    [(leaks.PRESENCE[0], (12, 40)), pytest.param(leaks.PRESENCE[1], (40, 51, 54), marks=pytest.mark.wide)],
    ids=[mutant.name for mutant in leaks.PRESENCE],
)
def test_a_strict_tenant_that_hears_of_others_is_noticed(mutant: Mutant, seeds: tuple[int, ...]) -> None:
    with mutant.applied():
        assert any((one := compare_alone(seed, num_rounds=ROUNDS)) is not None and one.difference for seed in seeds)
