"""Seeds that broke an invariant once. They hold now; those of which it can be shown break again without the repair."""

from __future__ import annotations

import pytest

from coppice_cache.core.ops import grants
from coppice_sim.hosts import cache as cache_host
from coppice_sim.nemesis import FaultProfile
from coppice_sim.run import Report, run
from coppice_sim.world import Scope

BARE = Scope(demands=False)


def report_of(seed: int, faults: FaultProfile | None = None) -> Report:
    return run(seed, steps=4_000, faults=faults, scope=BARE)


@pytest.mark.parametrize(
    ("seed", "owner", "name", "taken_away", "broken"),
    [
        pytest.param(1052, cache_host, "FIRST_EPOCHS", 1, "I9", id="two sessions under one epoch"),
        pytest.param(50205, grants, "still_waiting", lambda *_: None, "I10", id="another Pending for the same op"),
    ],
)
def test_it_holds_with_the_repair_and_not_without(
    monkeypatch: pytest.MonkeyPatch, seed: int, owner: object, name: str, taken_away: object, broken: str
) -> None:
    assert not report_of(seed).broken
    monkeypatch.setattr(owner, name, taken_away)
    assert report_of(seed).broken.startswith(broken)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [(2053, FaultProfile.restarts()), (50233, None), (50531, None), (60043, None)],
    ids=["2053", "50233", "50531", "60043"],
)
def test_copies_come_to_rest(seed: int, faults: FaultProfile | None) -> None:
    """Without the rule that a leaf is copied once for each use they went on for ever (`test_offload_at_rest`)."""
    report = report_of(seed, faults)
    assert not report.broken
    assert report.sometimes["demoted"]
