"""A process of the scheduler's: how it is started, what is wrong with it, how it ends, how often it comes again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Generic

from coppice.errors import EXIT_USAGE, CoppiceError, UsageError
from coppice.processes.child_process import describe_exit
from coppice_scheduler.edge.ipc.door_messages import CannotServe
from coppice_scheduler.edge.ipc.message_channel import HeardT, MessageChannel, SaidT
from coppice_scheduler.edge.processes.pulse import Pulse, processor_time_s

DYING_S = 0.2  # between the end of the connection and that of the process
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


class Child(Generic[SaidT, HeardT]):
    """One process, from its start to its end. Whoever makes it sets `channel`."""

    channel: MessageChannel[SaidT, HeardT]

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.started_s = time.monotonic()
        self.cannot_serve: CannotServe | None = None
        self._pulse = Pulse(self.started_s, partial(processor_time_s, process.pid))

    @property
    def is_gone(self) -> str:
        """How it is; empty when it is there."""
        is_cut_off = self.channel.is_closed
        with suppress(subprocess.TimeoutExpired):  # of a process that dies the connection ends a moment earlier
            self.process.wait(DYING_S if is_cut_off else 0)
            return f"ended ({describe_exit(self.process.returncode)})"
        return "was cut off" if is_cut_off else ""

    @property
    def is_silent(self) -> str:
        """For how long, where that means that it hangs; empty when it does not. To be asked often."""
        silent_s = self._pulse.silent_s(time.monotonic(), self.channel.heard_s)
        return f"said nothing for {silent_s:.0f} s" if silent_s else ""

    def end(self) -> None:
        """Now, whatever it does."""
        self.channel.close()
        self.channel.join()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def refuse(self) -> None:
        """Raises CoppiceError where it has said why another one could not begin either."""
        if self.cannot_serve is not None:
            kind = UsageError if self.cannot_serve.exit_code == EXIT_USAGE else CoppiceError
            raise kind(self.cannot_serve.what, hint=self.cannot_serve.hint)


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
