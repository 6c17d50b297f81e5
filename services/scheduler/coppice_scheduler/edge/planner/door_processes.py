"""The front doors' processes: started, watched, started again, ended. Lives on the planner process's main thread.

spawned --Serving--> serves --dies, falls silent, is cut off--> killed, spawned again under another number
        --CannotServe, dies--> the scheduler ends
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from coppice.edge.signal_event import SignalEvent
from coppice.errors import EXIT_USAGE, CoppiceError, UsageError
from coppice_scheduler.edge.base.idempotency import Claim, Settled
from coppice_scheduler.edge.base.metrics import MULTIPROCESS_VARIABLE
from coppice_scheduler.edge.ipc.door_channel import DoorChannel
from coppice_scheduler.edge.ipc.door_messages import (
    DOORS_MAX,
    Asks,
    CannotServe,
    FromDoor,
    Serving,
    Start,
    Stop,
)
from coppice_scheduler.edge.planner.door_pulse import DoorPulse, processor_time_s
from coppice_scheduler.edge.planner.doors import Door, Doors

_log = logging.getLogger("coppice.scheduler")
START_S = 120.0
RESTARTS_MAX = 5  # of one front door within the window
RESTART_WINDOW_S = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True, eq=False)
class _Process:
    """One front door, from its start to its end."""

    number: int  # in the high bits of its requests' numbers
    process: subprocess.Popen[bytes]
    started_s: float
    serves: bool = False
    cannot_serve: CannotServe | None = None
    channel: DoorChannel = field(init=False)
    pulse: DoorPulse = field(init=False)

    def __post_init__(self) -> None:
        self.pulse = DoorPulse(self.started_s, partial(processor_time_s, self.process.pid))

    def end(self) -> None:
        self.channel.close()
        self.channel.join()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class DoorProcesses:
    """`changed` is set when `tend` has something to look at. All methods belong to the thread that made it."""

    def __init__(self, doors: Doors, start: Start, listener: socket.socket, count: int, changed: SignalEvent) -> None:
        self._doors = doors
        self._start = start
        self._listener = listener
        self._changed = changed
        self._num_started = 0
        self._processes: list[_Process] = []
        for _ in range(count):
            self._processes.append(self._spawn())
        self._restarts_s: list[deque[float]] = [deque() for _ in range(count)]

    def set_tenants(self, content: bytes) -> None:
        """For front doors that are started from now on."""
        self._start = replace(self._start, tenants=content)

    def tend(self) -> None:
        """Look after every front door once. Raises CoppiceError where starting again cannot help."""
        for place, one in enumerate(self._processes):
            trouble = self._trouble(one)
            if trouble:
                self._start_again(place, trouble)

    def stop(self, grace_s: float) -> None:
        """Tell all to end, and end those that have not after `grace_s`."""
        for one in self._processes:
            one.channel.send(Stop())
        self._wait(grace_s)

    def close(self, grace_s: float) -> None:
        """The same without a word: they end their streams with an error when they are alone."""
        for one in self._processes:
            one.channel.close()
        self._wait(grace_s)

    def _wait(self, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        for one in self._processes:
            try:
                one.process.wait(max(deadline_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                _log.warning("front door %d did not end within %.1f s; killed", one.process.pid, grace_s)
            one.end()

    def _trouble(self, one: _Process) -> str:
        """What is wrong with a front door; empty when nothing is."""
        now_s = time.monotonic()
        if one.process.poll() is not None:
            return f"ended ({_how(one.process.returncode)})"
        if one.channel.is_closed:
            return "was cut off"
        if one.serves and (silent_s := one.pulse.silent_s(now_s, one.channel.heard_s)):
            return f"said nothing for {silent_s:.0f} s"
        if not one.serves and now_s - one.started_s > START_S:
            return f"did not serve within {START_S:.0f} s"
        return ""

    def _start_again(self, place: int, trouble: str) -> None:
        one, restarts_s = self._processes[place], self._restarts_s[place]
        one.end()
        if one.cannot_serve is not None:
            kind = UsageError if one.cannot_serve.exit_code == EXIT_USAGE else CoppiceError
            raise kind(one.cannot_serve.what, hint=one.cannot_serve.hint)
        now_s = time.monotonic()
        while restarts_s and now_s - restarts_s[0] > RESTART_WINDOW_S:
            restarts_s.popleft()
        if not one.serves or len(restarts_s) >= RESTARTS_MAX:
            raise CoppiceError(f"a front door {trouble}", hint="see the log above")
        restarts_s.append(now_s)
        _log.warning("front door %d %s; its requests are cancelled, another is started", one.process.pid, trouble)
        self._processes[place] = self._spawn()

    def _free_number(self) -> int:
        """Of the numbers that no front door has, the one that was had longest ago: late words of its last owner, which
        name requests by it, have been heard by now."""
        taken = {one.number for one in self._processes}
        while True:
            number = self._num_started % DOORS_MAX
            self._num_started += 1
            if number not in taken:
                return number

    def _spawn(self) -> _Process:
        number = self._free_number()
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._listener.fileno())
            process = _deaf_to_signals(
                [sys.executable, "-m", "coppice_scheduler.edge.door", *map(str, inherited)],
                environ_of_door(os.environ, self._start.metrics_dir),
                inherited,
            )
        one = _Process(number, process, time.monotonic())
        door_channel = one.channel = DoorChannel(ours, lambda message: received(message), lambda: closed())
        door = Door(number, door_channel)

        def received(message: FromDoor) -> None:
            if isinstance(message, (Asks, Claim, Settled)):
                self._doors.heard(door, message)
            elif isinstance(message, Serving):
                one.serves = True
                self._doors.opened(door)
                self._changed.set()
            elif isinstance(message, CannotServe):
                one.cannot_serve = message

        def closed() -> None:
            self._doors.closed(door)
            self._changed.set()

        door_channel.start()
        door_channel.send(replace(self._start, door=number))
        return one


def environ_of_door(environ: Mapping[str, str], metrics_dir: str) -> dict[str, str]:
    """What a front door's libraries are told before they are loaded."""
    return {
        **environ,
        MULTIPROCESS_VARIABLE: metrics_dir,
        # Else tokenizers hands each text to a pool of threads of its own, in which short ones wait behind long ones.
        "TOKENIZERS_PARALLELISM": "false",
    }


def _deaf_to_signals(argv: list[str], environ: dict[str, str], inherited: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Started with SIGINT and SIGTERM blocked: Ctrl-C in a terminal is for this process only.

    It stays in our process group, so that whoever kills the group leaves nobody behind.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environ, pass_fds=inherited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
