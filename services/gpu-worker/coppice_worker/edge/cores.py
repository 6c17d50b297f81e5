"""How many threads are good for kernels on this machine: its cores, as far as this process may use them.

Two threads on one core take turns at its matrix units, and with more threads than a container's quota pays for, all of
them stand still for the rest of each period. Neither is looked at by torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def default_threads() -> int:
    """OMP_NUM_THREADS where somebody chose it, else as many as there are cores to use."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else usable_cores(_allowed_cpus())


def usable_cores(cpus: set[int], root: Path = _ROOT) -> int:
    """Cores that these CPUs belong to, or as many as the quota of this process' control groups pays for; at least 1."""
    siblings = root / "sys/devices/system/cpu"
    cores = {_read(siblings / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min([len(cores), *_quotas(root)]))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quotas(root: Path) -> Iterator[int]:
    """Whole CPUs of the group of this process and of those around it, under both versions of control groups."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        top = mounted / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            quota = _read(folder / "cpu.max").split() or [
                _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"),
            ]  # fmt: skip
            with suppress(ValueError, ZeroDivisionError):  # "max", -1 and no file: there is none
                if int(quota[0]) > 0:
                    yield int(quota[0]) // int(quota[1])
            if folder == top:
                break


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
