"""Seeds that broke an invariant once. They hold now."""

from __future__ import annotations

import pytest

from coppice_sim.nemesis import FaultProfile
from coppice_sim.run import Report, run
from coppice_sim.world import Scope

BARE = Scope(disks=False, demands=False)


def report_of(seed: int, faults: FaultProfile | None = None) -> Report:
    return run(seed, steps=4_000, faults=faults, scope=BARE)


@pytest.mark.wide
@pytest.mark.parametrize("seed", [1052, 50205], ids=["two sessions under one epoch", "another Pending for the same op"])
def test_it_holds(seed: int) -> None:
    """Later rules changed these runs: they hold without the repairs, too. What breaks then is shown by the model rule
    `X_RANDOM`, and by `test_asked_again_while_it_waits_it_gets_the_same_answer`."""
    assert not report_of(seed).broken


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (50233, None),
        pytest.param(2053, FaultProfile.restarts(), marks=pytest.mark.wide),
        pytest.param(50531, None, marks=pytest.mark.wide),
        pytest.param(60043, None, marks=pytest.mark.wide),
    ],
    ids=["50233", "2053", "50531", "60043"],
)
def test_copies_come_to_rest(seed: int, faults: FaultProfile | None) -> None:
    """Without the rule that a leaf is copied once for each use they went on for ever (`test_offload_at_rest`)."""
    report = report_of(seed, faults)
    assert not report.broken
    assert report.sometimes["demoted"]


@pytest.mark.wide
def test_a_strict_domain_whose_claims_are_displaced_has_room_for_others() -> None:
    """I14: a claim of another domain took its blocks after a restart, and its reserve was still that of before
    (`test_displaced_claims_leave_a_strict_domain_its_share`)."""
    assert not run(1204, steps=3_058, scope=Scope(tiers=False)).broken


@pytest.mark.wide
def test_a_scheduler_that_comes_back_when_its_worker_was_given_up() -> None:
    """I9: the worker came after all; its fence spared the session, and did not name what the session had claimed."""
    assert not run(732971031, steps=4_000, scope=Scope(tiers=False)).broken


@pytest.mark.wide
def test_a_source_of_before_a_restart_is_not_copied() -> None:
    """I9: the lease was claimed, the source of its copy was not, and was granted again
    (`test_what_an_earlier_cache_service_named_is_not_copied`)."""
    assert not run(
        18_033, steps=2_000, faults=FaultProfile.cache_restarts(), scope=Scope(tiers=False, demands=False)
    ).broken
