"""The front doors' processes: started, watched, started again, ended. Lives on the service's main thread.

spawned --Serving--> serves --dies, falls silent, is cut off--> killed, spawned again under another number
        --CannotServe, dies--> the scheduler ends
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping

from msgspec.structs import replace

from coppice.edge.signal_event import SignalEvent
from coppice.errors import CoppiceError
from coppice_scheduler.edge.base.idempotency import Claim, Settled
from coppice_scheduler.edge.base.metrics import MULTIPROCESS_VARIABLE
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PARENT,
    DOORS_MAX,
    PARENT_TO_DOOR,
    CannotServe,
    DoorToParent,
    ParentToDoor,
    Serving,
    Start,
    Stop,
)
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.processes.child import Child, Restarts, spawn
from coppice_scheduler.edge.processes.claims import Claims

_log = logging.getLogger("coppice.scheduler")
START_S = 120.0


class _Door(Child[ParentToDoor, DoorToParent]):
    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process)
        self.number = number  # in the high bits of its requests' numbers
        self.serves = False
        self.is_cut_off = False  # by the planner
        self.beat: tuple[float, int] = (0.0, 0)  # when it said last how many requests are at other schedulers' planners

    @property
    def trouble(self) -> str:
        """What is wrong with it; empty when nothing is."""
        if self.is_gone or self.is_cut_off:
            return self.is_gone or "was cut off"
        if self.serves:
            return self.is_silent
        return f"did not serve within {START_S:.0f} s" if time.monotonic() - self.started_s > START_S else ""


class DoorProcesses:
    """`changed` is set when `tend` has something to look at. All methods belong to the thread that made it."""

    def __init__(self, claims: Claims, start: Start, listener: socket.socket, count: int, changed: SignalEvent) -> None:
        self._claims = claims
        self._start = start
        self._listener = listener
        self._changed = changed
        self._num_started = 0
        self._processes: list[_Door] = []
        for _ in range(count):
            self._processes.append(self._spawn())
        self._restarts = [Restarts() for _ in range(count)]

    def set_tenants(self, content: bytes) -> None:
        """For front doors that are started from now on."""
        self._start = replace(self._start, tenants=content)

    def cut_off(self, number: int) -> None:
        """The planner takes no more of it."""
        for one in self._processes:
            one.is_cut_off = one.is_cut_off or one.number == number

    def have_none_away(self, since_s: float) -> bool:
        """Whether all have said since then (monotonic clock) that no planner of another scheduler serves them."""
        return all(heard_s > since_s and not num_away for heard_s, num_away in (one.beat for one in self._processes))

    def tend(self) -> None:
        """Look after every front door once. Raises CoppiceError where starting again cannot help."""
        for place, one in enumerate(self._processes):
            if trouble := one.trouble:
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

    def _start_again(self, place: int, trouble: str) -> None:
        one = self._processes[place]
        one.end()
        one.refuse()
        if not one.serves or not self._restarts[place].may():
            raise CoppiceError(f"a front door {trouble}", hint="see the log above")
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

    def _spawn(self) -> _Door:
        number = self._free_number()
        ours, theirs = socket.socketpair()
        with theirs:
            environ = environ_of_door(os.environ, self._start.metrics_dir)
            process = spawn("coppice_scheduler.edge.door", environ, theirs, self._listener)
        one = _Door(number, process)

        def received(message: DoorToParent) -> None:
            if isinstance(message, (Claim, Settled)):
                self._claims.heard(number, message)
            elif isinstance(message, Serving):
                one.serves = True
                self._changed.set()
            elif isinstance(message, CannotServe):
                one.cannot_serve = message
            else:
                one.beat = time.monotonic(), message.num_away

        def closed() -> None:
            self._claims.close_door(number)
            self._changed.set()

        channel = one.channel = MessageChannel(
            ours, PARENT_TO_DOOR, DOOR_TO_PARENT, received, closed, peer=f"front door {process.pid}"
        )
        self._claims.open_door(number, channel.send)
        channel.start()
        channel.send(replace(self._start, door=number))
        return one


def environ_of_door(environ: Mapping[str, str], metrics_dir: str) -> dict[str, str]:
    """What a front door's libraries are told before they are loaded."""
    return {
        **environ,
        MULTIPROCESS_VARIABLE: metrics_dir,
        # Else tokenizers hands each text to a pool of threads of its own, in which short ones wait behind long ones.
        "TOKENIZERS_PARALLELISM": "false",
    }
