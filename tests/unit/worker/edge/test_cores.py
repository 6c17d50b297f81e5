"""How many threads a worker takes by itself: cores, not hardware threads, and no more than a quota pays for."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice_worker.edge.cores import default_threads, usable_cores

CPUS = set(range(8))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_threads_of_a_core_count_once(tmp_path: Path) -> None:
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in CPUS
    }
    assert usable_cores(CPUS, write(tmp_path, topology)) == 4
    assert usable_cores({1, 5}, tmp_path) == 1
    assert usable_cores({1, 2, 5}, tmp_path) == 2


def test_a_machine_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert usable_cores(CPUS, tmp_path) == 8


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"sys/fs/cgroup/a/b/cpu.max": "500000 100000", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/c/cpu.max": "100000 100000"}, 8),
    ],
)
def test_quotas_of_all_groups_around_a_process(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(CPUS, write(tmp_path, {"proc/self/cgroup": "0::/a/b", **files})) == cores


@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("-1", 8)])
def test_quotas_of_the_older_groups(tmp_path: Path, quota: str, cores: int) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/a"
    files = {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": "100000"}
    assert usable_cores(CPUS, write(tmp_path, {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/a", **files})) == cores


def test_what_somebody_chose_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert default_threads() >= 1
