"""Processor time of other processes, from /proc: 0 on systems that do not have it."""

from __future__ import annotations

import os
from pathlib import Path


def tree_time_s(pid: int) -> float:
    """Of this process and all below it that live, user and system, so far."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = int(fields[11]) + int(fields[12])
    spent = sum(of_one for each, of_one in ticks.items() if _is_below(each, pid, parents))
    return spent / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, top: int, parents: dict[int, int]) -> bool:
    while pid and pid != top:
        pid = parents.get(pid, 0)
    return pid == top != 0
