"""When a front door counts as dead, and what its process is told."""

from __future__ import annotations

import os
import time

from coppice_scheduler.edge.processes.door_processes import environ_of_door
from coppice_scheduler.edge.processes.pulse import (
    BUSY_S,
    SILENCE_MAX_S,
    SILENCE_S,
    Pulse,
    processor_time_s,
)

LOOK_S = 0.25


class Door:
    """A front door in made-up time, looked at as often as the real one."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.heard_s = 100.0
        self.cpu_s = 7.0
        self.pulse = Pulse(self.now_s, lambda: self.cpu_s)

    def passes(self, seconds: float, *, busy: float = 0.0, beats: bool = False) -> float:
        """For how long it was silent when it was found dead; 0: it was not."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.cpu_s += busy * LOOK_S
            if beats:
                self.heard_s = self.now_s
            silent_s = self.pulse.silent_s(self.now_s, self.heard_s)
            if silent_s:
                return silent_s
        return 0.0


def test_a_door_that_beats_lives_and_one_that_does_nothing_is_dead() -> None:
    door = Door()
    assert door.passes(500, beats=True) == 0
    assert door.passes(500) == SILENCE_S + LOOK_S


def test_a_door_that_computes_is_not_dead() -> None:
    door = Door()
    door.passes(5, beats=True)
    assert door.passes(3 * SILENCE_S, busy=1.0) == 0
    assert door.passes(500, beats=True) == 0, "and is as before when it beats again"
    assert door.passes(500) == SILENCE_S + LOOK_S


def test_computing_for_ever_is_no_life() -> None:
    door = Door()
    assert door.passes(500, busy=1.0) == SILENCE_MAX_S + LOOK_S


def test_a_door_that_computed_and_then_stops_is_dead_soon() -> None:
    door = Door()
    assert door.passes(SILENCE_S + 5, busy=1.0) == 0
    assert 2 * SILENCE_S < door.passes(500) <= 3 * (SILENCE_S + LOOK_S)


def test_threads_that_only_wait_do_not_count() -> None:
    door = Door()
    assert door.passes(500, busy=BUSY_S / SILENCE_S / 2) == SILENCE_S + LOOK_S


def test_a_front_door_tokenises_each_text_in_the_thread_that_asks() -> None:
    environ = environ_of_door({"TOKENIZERS_PARALLELISM": "true", "A": "b"}, "folder")
    assert (environ["TOKENIZERS_PARALLELISM"], environ["A"]) == ("false", "b")


def test_processor_time_of_a_process() -> None:
    before_s = processor_time_s(os.getpid())
    assert abs(before_s - time.process_time()) < 60
    deadline_s = time.monotonic() + 60
    while processor_time_s(os.getpid()) <= before_s:
        assert time.monotonic() < deadline_s
    assert processor_time_s(2**22 + 1) == 0.0, "no process has this number"
