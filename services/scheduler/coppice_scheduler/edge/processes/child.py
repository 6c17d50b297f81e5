"""A process of the scheduler's: how it is started, and how often again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping

RESTARTS_MAX = 5  # of one within the window
RESTART_WINDOW_S = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spawn(module: str, environ: Mapping[str, str], *inherited: socket.socket) -> subprocess.Popen[bytes]:
    """`python -m MODULE FD...`, with SIGINT, SIGTERM and SIGHUP blocked: Ctrl-C in a terminal is for this process only.

    It stays in our process group, so that whoever kills the group leaves nobody behind.
    """
    descriptors = tuple(connection.fileno() for connection in inherited)
    argv = [sys.executable, "-m", module, *map(str, descriptors)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=dict(environ), pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Restarts:
    """Counts how often one is started again."""

    def __init__(self) -> None:
        self._when_s: deque[float] = deque()

    def may(self) -> bool:
        """Whether once more is not too often; counts it then."""
        now_s = time.monotonic()
        while self._when_s and now_s - self._when_s[0] > RESTART_WINDOW_S:
            self._when_s.popleft()
        if len(self._when_s) >= RESTARTS_MAX:
            return False
        self._when_s.append(now_s)
        return True
