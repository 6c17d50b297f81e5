"""Whether a process is dead: what it says, and the processor time that it takes while it says nothing.

    says something ----- silent for SILENCE_S ----- and again ----- SILENCE_MAX_S
                         |  it computed: it lives    |               dead, whatever it did
                         |  it did not: dead         |  the same

A front door and a planner say something at least once a second. One that is held up by work is late and goes on;
killing it would hold up or end the streams of everybody. A process that is stopped, or waits for what never
comes, takes no processor time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

SILENCE_S = 15.0  # it beats once a second
SILENCE_MAX_S = 4 * SILENCE_S  # work that takes longer does not end
BUSY_S = 0.5  # of processor time within SILENCE_S; threads that only wait take less


class Pulse:
    """Of one process. Times are monotonic seconds; `cpu_s` says how much processor time it has taken so far."""

    def __init__(self, now_s: float, cpu_s: Callable[[], float]) -> None:
        self._cpu_s = cpu_s
        self._alive_s = now_s  # when it was known to live
        self._cpu_then_s = cpu_s()

    def silent_s(self, now_s: float, heard_s: float) -> float:
        """For how long it has been silent, where that means that it is dead; 0: it is not. To be asked often."""
        if heard_s > self._alive_s:
            self._alive_s, self._cpu_then_s = heard_s, self._cpu_s()
        silent_s = now_s - heard_s
        if silent_s > SILENCE_MAX_S:
            return silent_s
        if now_s - self._alive_s <= SILENCE_S:
            return 0.0
        cpu_s = self._cpu_s()
        if cpu_s - self._cpu_then_s < BUSY_S:
            return silent_s
        self._alive_s, self._cpu_then_s = now_s, cpu_s
        return 0.0


def processor_time_s(pid: int) -> float:
    """Of all threads of a process, in user and system mode. 0 where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
