"""A process that another one starts: how it is tied to the life of its parent, and how its end reads."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from coppice.processes import tether


def tethered(command: Sequence[str]) -> list[str]:
    """The command with which this process starts another that the kernel kills when the starting thread ends."""
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]


def describe_exit(code: int) -> str:
    """What `Popen.returncode` means: `exit code 1` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
