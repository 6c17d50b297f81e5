"""A child on a node, as it was heard of last. Nothing here waits for a node, `kill` aside.

    PLACING ──► STARTING ──► RUNNING ──► ENDED ──restart──► PLACING      a node that does not answer ends it as well
       └── the agent is asked for a place: the same node, or another one after the death of a node

One call is under way at a time. While it has not been answered, what the last one said counts.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import ray
from ray.exceptions import RayError

from coppice.errors import CoppiceError, UnavailableError
from coppice_up.host import ChildSpec, Place
from coppice_up.on_ray.agent import Refused, Status

STATUS_PAUSE_S = 0.1
RETRY_PAUSE_S = 0.5
KILL_S = 10.0
LINES_KEPT = 200


class _State(Enum):
    PLACING = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()


class RayChild:
    """A `Child` in the hands of `agent`. `ask_place` calls the agent for a place and gives a reference to it.
    `environment`: what it gets beside that of its node and its spec's."""

    def __init__(
        self, agent: Any, spec: ChildSpec, place: Place, ask_place: Callable[[], Any], environment: Mapping[str, str]
    ) -> None:
        self._agent = agent
        self._environment = environment
        self._spec = spec
        self._place = place
        self._ask_place = ask_place
        self._call: Any = None
        self._next_call_s = 0.0
        self._is_ready = False
        self._exit = ""
        self._new_lines: list[str] = []
        self._last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._state = _State.STARTING
        self._start()

    @property
    def spec(self) -> ChildSpec:
        return self._spec

    @property
    def node(self) -> str:
        return self._place.node

    def is_running(self) -> bool:
        self._listen()
        return self._state is not _State.ENDED

    def is_ready(self) -> bool:
        self._listen()
        return self._state is _State.RUNNING and self._is_ready

    def describe_exit(self) -> str:
        assert self._state is _State.ENDED, "only an ended child has an exit"
        return self._exit

    def restart(self, spec: ChildSpec | None = None) -> None:
        assert self._state is _State.ENDED, "a running child is stopped before it is started again"
        self._spec = spec or self._spec
        self._is_ready = False
        self._state = _State.PLACING
        self._call = self._ask_place()

    def terminate(self) -> None:
        if self._state is not _State.ENDED:
            with contextlib.suppress(Exception):  # it is out of reach, or Ray is
                self._agent.terminate.remote()

    def kill(self) -> None:
        try:
            ray.get(self._agent.kill.remote(), timeout=KILL_S)
        except Exception:  # it is out of reach, or Ray is
            with contextlib.suppress(Exception):
                ray.kill(self._agent, no_restart=False)  # the child is tied to it
        self._end("killed")

    def new_lines(self) -> list[str]:
        lines, self._new_lines = self._new_lines, []
        return lines

    def last_lines(self, count: int) -> list[str]:
        return list(self._last_lines)[-count:]

    def _listen(self) -> None:
        """Take an answer that has come, and ask on. Raises UnavailableError when it can never run again."""
        if self._state is _State.ENDED:
            return
        if self._call is None and time.monotonic() < self._next_call_s:
            return
        try:
            if not ray.is_initialized():
                raise ConnectionError("its client has given up")
            if self._call is None:
                self._ask()
            if not ray.wait([self._call], timeout=0)[0]:
                return
            call, self._call = self._call, None
            answer = ray.get(call)
        except ConnectionError as error:
            lost = UnavailableError(
                f"the connection to Ray is lost: {_first_line(error)}", hint="start the stack again"
            )
            raise self._ended_for_good(lost) from None
        except RayError as error:
            self._next_call_s = time.monotonic() + RETRY_PAUSE_S
            if self._state is _State.RUNNING:
                self._end(f"its agent on node {self._place.node} does not answer: {_first_line(error)}")
            return
        self._take(answer)

    def _ask(self) -> None:
        if self._state is _State.RUNNING:
            self._call = self._agent.status.remote(not self._is_ready)
        elif self._state is _State.STARTING:
            self._start()
        else:
            self._call = self._ask_place()

    def _start(self) -> None:
        environment = {**self._environment, **self._spec.environment}
        self._call = self._agent.start.remote(replace(self._spec, environment=environment, moved=None, led=None))

    def _take(self, answer: Place | Status | Refused | None) -> None:
        match answer:
            case Refused():
                raise self._ended_for_good(answer.error())
            case Place():
                self._move(answer)
                self._state = _State.STARTING
                self._start()
            case Status():
                self._next_call_s = time.monotonic() + STATUS_PAUSE_S
                self._new_lines += answer.lines
                self._last_lines.extend(answer.lines)
                self._is_ready = self._is_ready or answer.is_ready
                if not answer.is_running:
                    self._end(answer.exit)
            case None if self._state is _State.STARTING:
                self._state = _State.RUNNING
            case None:
                self._end(f"its agent on node {self._place.node} died")

    def _move(self, place: Place) -> None:
        """Addresses of a child stay while it is on one node."""
        if place.node == self._place.node:
            return
        if self._spec.moved is None:
            gone = f"node {self._place.node} is gone, and {self._spec.name} with it, whose address the others were told"
            raise self._ended_for_good(UnavailableError(gone, hint="start the stack again"))
        self._spec = self._spec.moved(place)
        self._place = place

    def _ended_for_good(self, error: CoppiceError) -> CoppiceError:
        """To be raised once; then the child has ended."""
        self._end(error.what)
        return error

    def _end(self, how: str) -> None:
        self._state = _State.ENDED
        self._exit = how
        self._call = None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
