"""Both cores, compiled of copies of their packages; then tests of each, and the simulator, on what was compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from coppice.compiled import ALWAYS, VARIABLE, Build, build_of
from scripts.compile_cores import PACKAGES, compile_core

ROOT = Path(__file__).resolve().parents[4]
# They put something of theirs in the place of a function or a method of a core, which compiled code does not see.
OF_THE_SOURCE = (
    "tests/contract/cache/test_cache_admin.py::test_a_broken_core_ends_the_process",
    "tests/contract/cache/test_cache_inspection.py::test_an_audit_that_fails_itself_is_a_finding",
    "tests/contract/cache/test_cache_inspection.py::test_one_audit_at_a_time",
    "tests/contract/planner/test_planner_turns.py",
    "tests/unit/cache/eviction/test_floor.py::test_by_age_it_hits_what_lru_hits",
    "tests/unit/cache/eviction/test_floor.py::test_marks_follow_their_blocks",
    "tests/unit/cache/eviction/test_reuse_hints.py",
    "tests/unit/cache/inspection/test_audit.py::test_leaving_out_what_moved_is_needed",
    "tests/unit/cache/inspection/test_audit.py::test_the_second_look_is_needed",
    "tests/unit/cache/machine/test_mutants.py",
    "tests/unit/cache/ops/test_reclaim.py::test_the_check_sees_a_reclaim_that_takes_from_a_guarantee",
    "tests/unit/cache/ops/test_reclaim.py::test_without_the_reservation_it_would_starve",
    "tests/unit/cache/pool/test_block_time.py::test_the_audit_misses_a_domain_that_took_its_time_along",
    "tests/unit/cache/pool/test_block_time.py::test_the_audit_sees_that_nothing_is_told_of_changes",
    "tests/unit/scheduler/batch/test_progress.py",
    "tests/unit/scheduler/engine/test_chaos.py::test_a_row_without_a_block_is_seen",
    "tests/unit/scheduler/engine/test_chaos.py::test_an_early_publish_is_seen",
    "tests/unit/scheduler/engine/test_chaos.py::test_an_early_release_is_seen",
    "tests/unit/scheduler/engine/test_submit_failed.py::test_after_a_failed_decision_all_is_as_before",
    "tests/unit/scheduler/engine/test_submit_failed.py::test_what_changes_the_core_is_not_called_harmless",
    "tests/unit/scheduler/policy/test_reclaim.py::test_without_the_reclaim_the_guarantee_would_wait",
    "tests/unit/scheduler/policy/test_running_slots.py::test_everybody_ends_and_nobody_gives_way_too_often",
)
CONTRACTS = ("tests/contract/planner", "tests/contract/links", "tests/contract/cache")
STACKS = ("tests/e2e/test_front_doors.py",)
CAN_COMPILE = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not CAN_COMPILE, reason="there is no C compiler, or no Python.h"),
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, each with its compiled core."""
    folder = tmp_path_factory.mktemp("packages")
    for relative in PACKAGES.values():
        target = folder / relative.name
        shutil.copytree(ROOT / relative, target, ignore=shutil.ignore_patterns("__pycache__", "_compiled*"))
        compile_core(ROOT / relative, target, tmp_path_factory.mktemp("made"))
        assert build_of(target) is Build.CURRENT
    return folder


def run(packages: Path, *command: str) -> None:
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, VARIABLE: ALWAYS, "PYTHONPATH": os.pathsep.join(path)}
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-20_000:]


def test_units_contracts_seeds_and_a_stack_pass_on_compiled_cores(packages: Path) -> None:
    """One test: two processes would compile twice."""
    for name in OF_THE_SOURCE:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), f"{name} is gone"
    left_out = [f"--deselect={name}" if "::" in name else f"--ignore={name}" for name in OF_THE_SOURCE]
    for tests in ("tests/unit/cache", "tests/unit/scheduler", *CONTRACTS):
        run(packages, "pytest", tests, *left_out)
    run(packages, "coppice_sim.command", "--runs", "20", "--steps", "2000", "--check-every", "5", "--brief")
    run(packages, "pytest", "-m", "not long", *STACKS)
