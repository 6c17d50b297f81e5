"""The suite must notice when a protection is taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from coppice_sim.command import main
from coppice_sim.mutants.cell import CELL, CELL_MASKED
from coppice_sim.mutants.copies import COPIES, COPIES_MASKED
from coppice_sim.mutants.drains import DRAINS, DRAINS_MASKED
from coppice_sim.mutants.moves import MOVES
from coppice_sim.mutants.owners import OWNERS, OWNERS_MASKED
from coppice_sim.mutants.registry import MASKED, MUTANTS, RECLAIM_IGNORED, Mutant
from coppice_sim.mutants.versions import VERSIONS, VERSIONS_MASKED
from coppice_sim.run import run
from coppice_sim.shrink import Case, name_of, shrink
from coppice_sim.world import Scope
from tests.simulation import test_cell
from tests.unit.cache.host_tier import test_disk_kept as test_cache_disk_kept
from tests.unit.cache.ops import test_distrust as test_cache_distrust
from tests.unit.cache.ops import test_reclaim as test_cache_reclaim
from tests.unit.cache.recovery import test_claims as test_cache_claims
from tests.unit.cache.recovery import test_ownership as test_cache_ownership
from tests.unit.cache.recovery import test_regrowth as test_cache_regrowth
from tests.unit.cache.recovery import test_restart as test_cache_restart
from tests.unit.cache.recovery import test_restart_epochs as test_cache_restart_epochs
from tests.unit.cache.recovery import test_seal_key_rotation as test_cache_rotation
from tests.unit.cache.recovery import test_sessions as test_cache_sessions
from tests.unit.cache.recovery import test_workers as test_cache_workers
from tests.unit.cache.world import World, tokens
from tests.unit.scheduler.engine import test_epochs as test_scheduler_core_epochs
from tests.unit.scheduler.engine import test_forks as test_scheduler_core_forks
from tests.unit.scheduler.engine import test_outages as test_scheduler_core_outages
from tests.unit.scheduler.queue import test_salts as test_scheduler_salts
from tests.unit.worker.core import test_blocks as test_worker_core_blocks
from tests.unit.worker.core import test_copies as test_worker_core_copies
from tests.unit.worker.core import test_disk_copies as test_worker_core_disk_copies
from tests.unit.worker.core import test_epochs as test_worker_core_epochs
from tests.unit.worker.core import test_sources as test_worker_core_sources

SEEDS = range(1, 21)
STEPS = 2_500
WHOLE_RUNS = (*MUTANTS, *MOVES, *OWNERS, *CELL, *COPIES, *DRAINS, *VERSIONS)
# Seeds that notice these sooner than the first ones. They are asked first, and the others when runs have changed.
SOONER = {
    "anybody yields": 11,
    "no epoch bits": 11,
    "shared root": 3,
    "salt not asked for": 7,
    "salts not kept apart": 7,
    "no zeroing": 3,
    "fork of another domain, copied": 10,
    "copies answered early": 2,
    "full disks are believed": 9,
    "torn files are read": 35,
    "kept files are believed": 13,
    "queue without shares": 3,
    "reclaim from guarantees": 3,
    "replay without generations": 4,
    "replay without seals": 8,
    "fence without effect": 13,
    "eras are forgotten": 12,
    "granted where it drains": 2,
    "kept where it drains": 5,
    "drain counts in full": 12,
    "drain said once": 5,
    "never shared": 11,
    "never left": 5,
}


# They take seconds each; some of each other's kind are quicker.
SLOW = frozenset(
    {
        "anybody yields",
        "dead at work",
        "drain forgotten",
        "drain kept secret",
        "drain said once",
        "drains for ever",
        "each by itself",
        "fork of another domain, copied",
        "gone means dead",
        "never left",
        "never shared",
        "no fence wait",
        "no re-attach window",
        "reclaim from guarantees",
        "salts not kept apart",
        "successor without fence",
        "sums not counted",
        "tokens drawn twice",
    }
)


# Of those that whole runs have to notice, these stand for all in `make test`.
FEW = frozenset({"shared root", "no zeroing", "forgets to release"})


def cases(mutants: Sequence[Mutant], few: frozenset[str] | None = None) -> list[Any]:
    """`few`: the others are wide; None: those that are slow."""
    wide = {mutant.name for mutant in mutants if (mutant.name in SLOW if few is None else mutant.name not in few)}
    return [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.wide] if mutant.name in wide else [])
        for mutant in mutants
    ]


def killed_by(mutant: Mutant, *, check_every: int = 1, evidence: str = "") -> str:
    """What the first seed that notices (this evidence) says; empty when none does."""
    with mutant.applied():
        sooner = SOONER.get(mutant.name, SEEDS[0])
        for seed in (sooner, *(seed for seed in SEEDS if seed != sooner)):
            tiers = mutant.tiers or mutant.disks
            scope = Scope(tiers=tiers, disks=mutant.disks, demands=mutant.demands, check_every=check_every)
            report = run(seed, steps=STEPS, faults=mutant.faults, scope=scope)
            if report.broken and evidence in report.broken:
                return report.broken
    return ""


def named(name: str) -> Mutant:
    return next(mutant for mutant in (*WHOLE_RUNS, *MASKED) if mutant.name == name)


@pytest.mark.parametrize("mutant", cases(WHOLE_RUNS, FEW))
def test_a_run_notices(mutant: Mutant) -> None:
    assert killed_by(mutant), f"{mutant.breaks}: no seed noticed"


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("shared root", "I12"),
        ("no zeroing", "I15"),
        pytest.param("forgets to release", "O4", marks=pytest.mark.wide),
        pytest.param("step order unchecked", "I12", marks=pytest.mark.wide),
        pytest.param("tokens drawn twice", "I12", marks=pytest.mark.wide),
    ],
)
def test_clients_and_workers_notice_without_the_checks_of_the_cores(name: str, evidence: str) -> None:
    assert killed_by(named(name), check_every=0, evidence=evidence)


def _cached_blocks() -> World:
    world = World(num_blocks=16)
    world.fill(1, tokens(16))
    return world


# What hides the loss of a protection in a whole run does not hide it from a question asked directly.
DIRECT: dict[str, Callable[[], None]] = {
    "copy of what is gone": (
        test_scheduler_core_forks.test_a_source_that_is_lost_while_its_fork_waits_for_its_first_plan_is_not_copied
    ),
    "fork of another domain": (
        test_scheduler_core_forks.test_no_relation_across_domains_prompts_or_with_who_wants_log_probabilities_of_the_prompt
    ),
    "fork of another salt": test_scheduler_salts.test_no_fork_of_a_request_with_another_salt,
    "chain keys are believed": test_cache_rotation.test_a_log_that_names_another_domain_finds_nothing_for_it,
    "copy source not compared": test_worker_core_sources.test_a_source_with_other_tokens_is_refused,
    "lost blocks keep their seals": (
        test_worker_core_disk_copies.test_what_the_disk_did_not_give_is_read_no_more_and_its_target_has_no_seal
    ),
    "set aside hears nothing": test_cache_disk_kept.test_a_prefix_that_is_invalidated_meanwhile_does_not_come_back,
    "answers of another cache service": (
        test_worker_core_copies.test_a_new_cache_epoch_hears_nothing_of_the_orders_of_the_old_one
    ),
    "fence beside copies": test_worker_core_copies.test_a_fence_is_acknowledged_when_the_copies_before_it_are_over,
    "takeover ends holds": test_worker_core_copies.test_a_takeover_leaves_copies_their_blocks,
    "no generation check": test_worker_core_blocks.test_only_an_owned_handle_opens_an_occupancy,
    "no seal check": test_worker_core_blocks.test_unsealed_block_is_not_read_even_with_a_seal_of_zeros,
    "no drain pins": lambda: test_cache_distrust.test_a_drain_pin_keeps_the_blocks_until_the_fence(_cached_blocks()),
    "no second look": test_cache_restart.test_the_second_look_takes_what_is_someone_elses_by_now,
    "trees miss the second look": test_cache_regrowth.test_the_second_look_decides,
    "shared claims are not judged": test_cache_claims.test_shared_claims_need_equal_generation_and_seal,
    "fenced sessions come back": test_cache_restart.test_fenced_sessions_never_reattach,
    "dead worker epochs forgotten": (
        test_cache_restart_epochs.test_a_worker_epoch_that_a_session_was_told_is_over_stays_over
    ),
    "lost leases forgotten": (
        test_scheduler_core_epochs.test_a_restarted_cache_hears_of_what_another_refused_as_long_as_it_may_run
    ),
    "epoch not raised": test_cache_workers.test_a_worker_that_saw_a_higher_epoch_calls_for_a_new_incarnation,
    "no pause guard": test_cache_sessions.test_our_own_pause_expires_nobody,
    "nothing is kept for a need": test_cache_reclaim.test_needs_are_met_in_the_order_in_which_they_were_refused,
    "lease digest ignored": test_scheduler_core_outages.test_a_different_digest_is_answered_with_the_lease_set,
    "one refusal shuts the gate": (
        test_scheduler_core_forks.test_a_fork_that_is_refused_where_its_prompt_is_holds_nobody_up_and_asks_all_next
    ),
    "sums not counted": test_cell.check_fair_shares,
    "each by itself": test_cell.check_concurrency,
    "newest plans": (test_worker_core_epochs.test_whom_the_cache_service_names_plans_and_nobody_else_whoever_is_newer),
    "owner of whoever": test_worker_core_epochs.test_what_is_said_to_the_epoch_before_names_nobody,
    "listed to all": (
        test_cache_ownership.test_a_scheduler_that_does_not_know_owners_is_asked_for_nothing_and_does_without_what_it_does_not_own
    ),
    "back to an older session": lambda: (
        test_cache_ownership.test_a_worker_that_does_not_know_owners_is_given_to_a_newer_session_alone(False)
    ),
    "old scheduler plans on": test_worker_core_epochs.test_newer_scheduler_takes_over_and_the_older_is_refused,
}


@pytest.mark.parametrize(
    "mutant", cases([*MASKED, *OWNERS_MASKED, *CELL_MASKED, *COPIES_MASKED, *DRAINS_MASKED, *VERSIONS_MASKED])
)
def test_a_unit_test_notices_what_other_protections_cover(mutant: Mutant) -> None:
    ask = DIRECT[mutant.name]
    ask()
    noticed = False
    with mutant.applied():
        try:
            ask()
        except Exception:
            noticed = True
    assert noticed, f"{mutant.breaks}: the unit test did not notice"


@pytest.mark.parametrize("seeds", [(44,), pytest.param((1, 2, 3, 68, 85, 92, 101), marks=pytest.mark.wide)])
def test_a_scheduler_that_gives_nothing_back_holds_nobody_up(seeds: Sequence[int]) -> None:
    forced = 0
    with RECLAIM_IGNORED.applied():
        for seed in seeds:
            report = run(seed, steps=STEPS, scope=Scope(tiers=False, demands=False))
            assert not report.broken, report.line
            forced += report.sometimes["reclaim forced through a fence"]
    assert forced > 0


@pytest.mark.wide
def test_a_broken_run_is_made_smaller_and_breaks_the_same() -> None:
    case, said = Case(5, 2_000), []
    with named("shared root").applied():
        report = case.run()
        smallest = shrink(case, report, said=said.append)
        assert name_of(smallest.run().broken) == name_of(report.broken)
    assert smallest.steps < 500
    assert {"tiers", "demands"} <= set(smallest.without)
    assert said[-1].endswith(smallest.command)
    assert not smallest.run().broken


def test_a_broken_run_names_the_seed_and_what_broke(capsys: pytest.CaptureFixture[str]) -> None:
    with named("shared root").applied():
        assert main(["--seed", "9", "--runs", "1", "--steps", "400"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN I3" in out
    assert "replay: coppice sim --seed 9 --steps 400" in out
