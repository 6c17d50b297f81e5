"""The three cores under faults, from seeds: each run holds every invariant, all of them see every kind of trouble."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from coppice_sim.command import main
from coppice_sim.nemesis import FaultProfile
from coppice_sim.run import Report, run
from coppice_sim.shrink import Case
from coppice_sim.world import Scope

STEPS = 2_000
DISK_SEEDS = (13, 53)  # together they show what a disk does
FEW_SEEDS = (3, 22, 31, 40, 57, 68, 74)  # together they show every kind of trouble
BARE = Scope(tiers=False, demands=False)
WITH_HOST_TIERS = Scope(disks=False, demands=False)
WITH_DISKS = Scope(demands=False)

# Each must happen in some run, or the runs show nothing about it.
SOMETIMES = (
    "block reused after a restart",
    "borrow then reclaim",
    "borrowed blocks taken back",
    "cancel loses to finish",
    "cancel wins",
    "crash of c",
    "crash of s",
    "crash of w",
    "copy answered again",
    "demoted",
    "duplicate release",
    "epoch forgotten",
    "error: session_lost",
    "error: worker_lost",
    "evicted",
    "evicted while an acquire was in flight",
    "fenced",
    "fork by copy",
    "fork by fallback",
    "invalidated",
    "late retry",
    "leader died",
    "log lost",
    "log made up",
    "log: leases_pinned",
    "log: refused_seal",
    "log-probabilities",
    "log: replayed",
    "log: replayed_to_host",
    "log: unclaimed",
    "no room",
    "ops doubled",
    "paused",
    "pending leader aborted with followers waiting",
    "pinned",
    "plan replayed",
    "moved before output",
    "moved behind output",
    "preempted in decode",
    "preempted in prefill",
    "prefix found",
    "prefix found under a salt",
    "prefix invalidated",
    "promoted",
    "published after a restart",
    "quota refusal",
    "refused: queue_full",
    "refused: wrong_seal",
    "reclaim forced through a fence",
    "reincarnated",
    "requests left a worker that was gone",
    "retry after a crash",
    "rolled back",
    "scheduler refused: fenced",
    "scheduler refused: superseded",
    "session ended",
    "session re-attached",
    "several decode steps in a plan",
    "succeeded",
    "sums of another scheduler",
    "tail of the log lost",
    "two schedulers alive",
    "upgraded",
    "waited for a flight",
    "yielded",
)


def held(report: Report) -> Report:
    assert not report.broken, "\n".join((report.line, *report.history))
    return report


def test_every_invariant_holds_while_the_tenants_file_changes() -> None:
    sometimes: Counter[str] = Counter()
    for seed in (1, 47):
        sometimes += held(run(seed, steps=STEPS, scope=Scope(disks=False))).sometimes
    assert [name for name in ("tenants changed", "error: tenant_removed", "quota refusal") if not sometimes[name]] == []


@pytest.mark.wide
def test_nothing_fails_where_nothing_breaks() -> None:
    for seed in range(100, 102):
        report = held(run(seed, steps=1_000, faults=FaultProfile.none()))
        assert report.outcomes["length"] > 0
        assert not report.outcomes["broken stream"]
        assert not [name for name in report.sometimes if name.startswith(("error: session", "error: worker", "crash"))]


@pytest.mark.wide
def test_every_invariant_holds_under_faults_and_every_kind_of_trouble_occurs() -> None:
    sometimes: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in FEW_SEEDS:
        report = held(run(seed, steps=STEPS, scope=Scope(disks=False, reloads=False, drains=False)))
        sometimes += report.sometimes
        outcomes += report.outcomes
    assert [name for name in SOMETIMES if not sometimes[name]] == []
    assert outcomes["open"] == 0
    assert outcomes["length"] + outcomes["stop"] > 10 * len(FEW_SEEDS)


def crash_the_cache(crashes: int, first_seed: int, scope: Scope = BARE) -> Counter[str]:
    """So many crashes of the cache service alone, each with a log that is whole, cut, lost or wrong."""
    sometimes: Counter[str] = Counter()
    seed = first_seed
    while sometimes["crash of c"] < crashes:
        sometimes += held(run(seed, steps=STEPS, faults=FaultProfile.cache_restarts(), scope=scope)).sometimes
        seed += 1
    return sometimes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("crashes", "first"),
    [
        (30, 710),
        pytest.param(300, 680, marks=pytest.mark.wide),
        pytest.param(1_000, 680, marks=pytest.mark.long),
    ],
)
def test_crashes_of_the_cache_and_no_stale_grant(crashes: int, first: int) -> None:
    """I4, I5, I8, I12 and whatever else is asked after every event; here what happened on the way."""
    sometimes = crash_the_cache(crashes, first)
    for name in ("replayed", "refused_generation", "refused_seal", "refused_parent", "leases_pinned"):
        assert sometimes[f"log: {name}"] > crashes // 10, name
    assert sometimes["published after a restart"] > crashes // 10
    assert sometimes["prefix found"] > crashes // 10


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Hash seeds differ between processes; nothing may depend on the order of a set."""
    lines = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "coppice_sim.command", "--seed", "2", "--runs", "1", "--steps", "1500"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        lines.append(done.stdout)
    assert lines[0] == lines[1]
    assert "ok" in lines[0]


def test_the_command_prints_one_line_per_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--runs", "2", "--steps", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed 3", "seed 4", "sometimes"]


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_ten_thousand_crashes_of_the_cache(first: int) -> None:
    crash_the_cache(1_000, first, (BARE, WITH_HOST_TIERS, WITH_DISKS)[first // 1_000 % 3])


@pytest.mark.wide
def test_host_tiers_come_back_after_crashes_of_the_cache() -> None:
    sometimes = crash_the_cache(140, 5_000, WITH_HOST_TIERS)
    assert sometimes["log: replayed_to_host"] > 60
    assert sometimes["promoted"] > 10


def test_what_is_on_a_disk_is_right_or_computed_again() -> None:
    """Copies of a disk fail at times, both ways; what was promoted behind one has passed all oracles."""
    sometimes: Counter[str] = Counter()
    for seed in DISK_SEEDS:
        sometimes += held(run(seed, steps=STEPS, scope=WITH_DISKS)).sometimes
    names = ("stored", "loaded", "not stored", "not loaded", "promoted")
    assert [name for name in names if not sometimes[name]] == []


@pytest.mark.wide
def test_disks_outlive_their_workers() -> None:
    """Files are lost and torn in crashes, too."""
    report = held(run(10, steps=3_000, faults=replace(FaultProfile.none(), crashes=2.5), scope=WITH_DISKS))
    for name in ("disk kept", "loaded", "crash of w", "crash of c", "log: replayed_to_disk"):
        assert report.sometimes[name] > 1, name


@pytest.mark.wide
def test_disks_come_back_after_crashes_of_the_cache() -> None:
    sometimes = crash_the_cache(140, 6_087, WITH_DISKS)
    assert sometimes["log: replayed_to_disk"] > 20
    assert sometimes["loaded"] > 5


@pytest.mark.long
@pytest.mark.batch
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(1_000, 3_000, 100))
def test_many_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        held(run(seed, steps=4_000))


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("faults", [FaultProfile.restarts(), FaultProfile.absences()], ids=["restarts", "absences"])
def test_many_seeds_of_one_kind_of_trouble(faults: FaultProfile) -> None:
    for seed in range(2_000, 2_080):
        held(run(seed, steps=4_000, faults=faults))


def test_the_command_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (
        (["--without", "rain"], "'rain' is none of disks, tiers, demands"),
        (["--runs", "0"], "'0' is no whole number from 1 up"),
        (["--steps", "-1"], "'-1' is no whole number from 0 up"),
        (["--seed", "abc"], "'abc' is no whole number"),
        (["--profile", "wild"], "invalid choice: 'wild'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_brief_runs_in_several_processes_end_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--seed", "3", "--runs", "4", "--steps", "150", "--jobs", "2", "--brief", "--check-every", "4"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("seeds 3 to 6: ")
    assert lines[-1].endswith("broken: none")


def test_a_case_names_the_command_that_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(5, 120, "restarts", ("tiers", "crashes"))
    assert case.command == "coppice sim --seed 5 --steps 120 --profile restarts --without tiers,crashes"
    assert main(case.command.split()[2:]) == 0
    assert capsys.readouterr().out.startswith(case.run().line)
