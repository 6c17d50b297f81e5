"""Starts children in stages, brings a crashed one back, stops them in turns.

    start:   stage 1 ready ──► stage 2 ready ──► ...      a death before the first readiness ends everything, unless
             another one of its role may still get ready: once it is, the dead one is started again, once
    watch:   a death after it: start again, at most RESTARTS_MAX times within RESTART_WINDOW_S; then the child is given
             up where another one of its role goes on, else everything ends
    follow:  a worker on several nodes is one child for each node; node 0 is the leader of the others. Another node is
             ready when it runs and node 0 is ready. When it dies, node 0 is about to die as well: it is started again
             as soon as node 0 is not ready, at the latest after LEADER_ENDS_S. When node 0 has moved to another
             address, the others are started again with that one, which is not counted as a crash. All nodes of a
             worker are given up together. A worker cannot get ready while a node of it is dead that was never ready:
             then nobody waits for it, and the stack does not go on with it alone
    stop:    turn 0, turn 1, ...: SIGTERM, grace, SIGKILL      a second request to stop: SIGKILL at once

One thread does all of this. Children must be started by the thread that lives as long as the process: the kernel ties
a child to the *thread* that started it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from coppice.edge.signal_event import SignalEvent
from coppice.errors import CoppiceError
from coppice_up.display import Display
from coppice_up.host import Child, ChildSpec, Host

TICK_S = 0.1
END_LOOK_S = 0.01  # at children that were told to stop
START_TIMEOUT_S = 900.0  # a large checkpoint on a slow disk
RESTARTS_MAX = 5
RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.5
LEADER_ENDS_S = 20.0  # after it has lost one of its nodes; else that one was out of our reach only
FIRST_STARTS_MAX = 2  # of a child that has never been ready
LOG_LINES_SHOWN = 15


class ChildFailed(CoppiceError):
    """A child died that cannot be brought back; its last log lines were shown."""


def _hint(tended: _Tended) -> str:
    return f"its last log lines are above, all of them in {tended.child.spec.log_path}"


class _Tended:
    """A child and what the supervisor knows of it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.started_at_s = time.monotonic()
        self.was_ready = False
        self.is_ready = False
        self.is_given_up = False
        self.died_at_s: float | None = None  # when that was noted
        self.restarts_at_s: deque[float] = deque()

    @property
    def name(self) -> str:
        return self.child.spec.name

    @property
    def has_failed_to_start(self) -> bool:
        """Until it is started again. What was ready once is always started again, or given up."""
        return not self.was_ready and not self.child.is_running()

    def is_part_of(self, other: _Tended) -> bool:
        """Or is the same."""
        return self.child.spec.whole == other.child.spec.whole

    def stands_in_for(self, other: _Tended) -> bool:
        role = self.child.spec.role
        return not self.is_part_of(other) and role != "" and role == other.child.spec.role and not self.is_given_up

    def begins_again(self, now_s: float) -> None:
        self.is_ready = False
        self.died_at_s = None
        self.started_at_s = now_s


class Supervisor:
    """Runs the children of `stages` on `host`; each stage starts when all of the one before it are ready."""

    def __init__(
        self, stages: Sequence[Sequence[ChildSpec]], host: Host, display: Display, *, show_logs: bool = False
    ) -> None:
        self._stages = stages
        self._host = host
        self._display = display
        self._show_logs = show_logs
        self._tended: list[list[_Tended]] = []
        self._stop_requests = 0
        self._wake = SignalEvent()

    def request_stop(self) -> None:
        """Safe to call from a signal handler. The first asks for an orderly stop, the second for one at once."""
        self._stop_requests += 1
        self._wake.set()

    @property
    def stop_requested(self) -> bool:
        return self._stop_requests > 0

    def start(self) -> bool:
        """Start all stages. False when a stop was requested meanwhile. Raises ChildFailed."""
        self._display.begin([spec.name for stage in self._stages for spec in stage])
        for specs in self._stages:
            stage: list[_Tended] = []
            self._tended.append(stage)
            for spec in specs:
                self._display.starting(spec.name, "")
                stage.append(_Tended(self._host.start(spec)))
            while not all(tended.is_ready or tended.is_given_up for tended in stage):
                if self.stop_requested:
                    return False
                self.tick()
                self._wake.wait(TICK_S)
        self._display.all_ready()
        return True

    def watch(self) -> None:
        """Tend the children until a stop is requested. Raises ChildFailed."""
        while not self.stop_requested:
            self.tick()
            self._wake.wait(TICK_S)

    def tick(self) -> None:
        """Look after every child once. Raises ChildFailed."""
        now_s = time.monotonic()
        for tended in self._all():
            if tended.is_given_up:
                continue
            self._follow_log(tended)
            self._follow_leader(tended, now_s)
            if not tended.child.is_running():
                self._revive(tended, now_s)
            elif not tended.is_ready:
                self._look_for_readiness(tended, now_s)

    def _follow_leader(self, tended: _Tended, now_s: float) -> None:
        child, leader = tended.child, self._leader_of(tended)
        meets_at = None if leader is None else leader.child.spec.meets_at
        if leader is None or meets_at is None or child.spec.led is None or meets_at == child.spec.meets_at:
            return
        if child.is_running():
            child.kill()
        while tended.restarts_at_s and tended.restarts_at_s[-1] >= leader.started_at_s:
            tended.restarts_at_s.pop()  # it had lost this leader, of which nobody knew yet where it is
        tended.begins_again(now_s)
        self._display.note(f"{tended.name} is started again, since {leader.name} runs on {leader.child.node} now")
        child.restart(child.spec.led(meets_at))

    def _leader_of(self, tended: _Tended) -> _Tended | None:
        """None where it has none, or is one."""
        return next((each for each in self._all() if each.name == tended.child.spec.leader), None)

    def _follow_log(self, tended: _Tended) -> None:
        if self._show_logs:
            self._display.log_lines(tended.name, tended.child.new_lines())
        elif not tended.is_ready:
            for line in tended.child.new_lines()[-1:]:
                self._display.starting(tended.name, line)

    def stop(self) -> None:
        """Stop what runs, turn by turn. Returns when no child is left."""
        self._display.close()
        children = [tended.child for tended in self._all()]
        for turn in sorted({child.spec.stop_turn for child in children}):
            self._stop_together([c for c in children if c.spec.stop_turn == turn and c.is_running()])
        self._tended.clear()

    def _stop_together(self, running: Sequence[Child]) -> None:
        for child in running:
            child.terminate()
        deadline_s = time.monotonic() + max((child.spec.stop_grace_s for child in running), default=0.0)
        while any(child.is_running() for child in running):
            if self._stop_requests > 1 or time.monotonic() > deadline_s:
                break
            time.sleep(END_LOOK_S)
        for child in running:
            if child.is_running():
                if self._stop_requests <= 1:
                    self._display.note(f"{child.spec.name} did not stop in {child.spec.stop_grace_s:.0f} s; killed")
                child.kill()

    def _all(self) -> list[_Tended]:
        return [tended for stage in self._tended for tended in stage]

    def _look_for_readiness(self, tended: _Tended, now_s: float) -> None:
        waited_s = now_s - tended.started_at_s
        leader = self._leader_of(tended)
        if tended.child.is_ready() and (leader is None or leader.is_ready):
            tended.is_ready = tended.was_ready = True
            self._display.ready(tended.name, waited_s)
            if tended.child.node:
                self._display.note(f"{tended.name} runs on {tended.child.node}")
        elif waited_s > START_TIMEOUT_S and not (tended.was_ready and self._others(tended)):
            self._show_last_lines(tended)
            self._give_up(tended, f"{tended.name} runs but was not ready within {START_TIMEOUT_S:.0f} s")

    def _revive(self, tended: _Tended, now_s: float) -> None:
        how = tended.child.describe_exit()
        others = self._others(tended)
        if not tended.was_ready and not others:
            self._show_last_lines(tended)
            raise ChildFailed(f"{tended.name} died while it started ({how})", hint=_hint(tended))
        if tended.died_at_s is None:
            tended.died_at_s = now_s
            tended.is_ready = False
            self._display.note(f"{tended.name} died ({how})")
            self._show_last_lines(tended)
        leader = self._leader_of(tended)
        # A worker dies as a whole, so the leader is about to.
        if leader is not None and leader.is_ready and now_s - tended.died_at_s < LEADER_ENDS_S:
            return
        if not tended.was_ready:
            if not any(other.is_ready for other in others):
                return  # what it died of may be everybody's, which would end the stack at once
            if len(tended.restarts_at_s) + 1 >= FIRST_STARTS_MAX:
                self._give_up(tended, f"{tended.name} died again while it started ({how})")
                return
        while tended.restarts_at_s and now_s - tended.restarts_at_s[0] > RESTART_WINDOW_S:
            tended.restarts_at_s.popleft()
        if len(tended.restarts_at_s) >= RESTARTS_MAX:
            again = f"{tended.name} died again after {RESTARTS_MAX} restarts within {RESTART_WINDOW_S:.0f} s"
            self._give_up(tended, f"{again} ({how})")
            return
        if tended.restarts_at_s and now_s - tended.restarts_at_s[-1] < RESTART_PAUSE_S:
            return
        tended.restarts_at_s.append(now_s)
        tended.begins_again(now_s)
        self._display.note(f"{tended.name} is started again ({len(tended.restarts_at_s)} of {RESTARTS_MAX} a minute)")
        tended.child.restart()

    def _give_up(self, tended: _Tended, what: str) -> None:
        """End all nodes of it where others of its role go on. Raises ChildFailed where none does."""
        others = [other.name for other in self._others(tended)]
        if not others:
            raise ChildFailed(what, hint=_hint(tended))
        for each in self._all():
            if each.is_part_of(tended):
                each.is_given_up = True
                if each.child.is_running():
                    each.child.kill()
        self._display.note(
            f"{what}; {tended.child.spec.leader or 'it'} is not started again, the stack goes on with "
            f"{', '.join(others)} ({_hint(tended)}; put right what they name, then start the stack again)"
        )

    def _others(self, tended: _Tended) -> list[_Tended]:
        """Of its role, that are ready or may get ready: no part of them is given up or has failed to start. Of several
        parts the leader."""
        failed = {each.child.spec.whole for each in self._all() if each.has_failed_to_start}
        alike = [each for each in self._all() if each.stands_in_for(tended) and not each.child.spec.leader]
        return [each for each in alike if each.name not in failed]

    def _show_last_lines(self, tended: _Tended) -> None:
        self._display.close()
        if self._show_logs:
            self._display.log_lines(tended.name, tended.child.new_lines())
            return
        lines = tended.child.last_lines(LOG_LINES_SHOWN)
        self._display.log_lines(tended.name, lines or ["(it wrote nothing)"])
