"""Turns of the planner: one at a time, on whichever thread; nothing that was brought is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from coppice.ids import CacheEpoch, Namespace, WorkerEpoch, WorkerId
from coppice.messages.index import WorkerInfo, Workers
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings
from coppice_scheduler.edge.planner import planner
from coppice_scheduler.edge.planner.planner import Planner
from tests.fakes.threads import no_threads
from tests.fakes.waiting import WAIT_S, wait_for

NOBODY = "127.0.0.1:1"  # no cache service: turns are taken nevertheless


class Core(SchedulerCore):
    """Wants to be asked again when a test says so."""

    def __init__(self) -> None:
        super().__init__(SchedulerSettings(instance=bytes(INSTANCE_BYTES)))
        self.wakeup_ns: int | None = None

    def next_wakeup_ns(self) -> int | None:
        return self.wakeup_ns


class World:
    def __init__(self) -> None:
        self.core = Core()
        self.failures: list[BaseException] = []
        self.at_the_end: list[Callable[[], None]] = []  # done once, at the end of the next turn
        self.turns: list[str] = []  # names of the threads that took them
        self.planner = Planner(self.core, NOBODY, "test", self._deliver, self.failures.append)
        self.planner.start()

    def _deliver(self, effects: Effects) -> None:
        self.turns.append(threading.current_thread().name)
        while self.at_the_end:
            self.at_the_end.pop()()


@pytest.fixture
def no_idle_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found by chance, only because somebody said so."""
    monkeypatch.setattr(planner, "IDLE_WAKEUP_NS", 600_000_000_000)


@pytest.fixture
def world(no_idle_turns: None) -> Iterator[World]:
    world = World()
    yield world
    world.planner.stop()


def brought_by(threads: int, work: Callable[[int], None]) -> None:
    bringing = [threading.Thread(target=work, args=(number,), name=f"bringer {number}") for number in range(threads)]
    for thread in bringing:
        thread.start()
    for thread in bringing:
        thread.join()


def test_everything_that_many_threads_bring_is_done_once_and_never_at_the_same_time(world: World) -> None:
    at_work, overlaps, done = [0], [0], [0] * 6

    def bring(number: int) -> None:
        def event() -> None:
            at_work[0] += 1
            overlaps[0] += at_work[0] > 1
            done[number] += 1
            if done[number] % 50 == 0:
                time.sleep(0.0002)  # lets others run in the middle of a turn
            at_work[0] -= 1

        for _ in range(500):
            world.planner.later(event)

    brought_by(6, bring)
    wait_for(lambda: done == [500] * 6, "all events")
    assert overlaps == [0]
    assert not world.failures


def test_what_comes_at_the_end_of_a_turn_is_done_though_nobody_comes_after_it(world: World) -> None:
    done = threading.Event()

    def bring_more() -> None:
        """The turn has looked into the inbox for the last time, and is still at work."""
        other = threading.Thread(target=world.planner.later, args=(done.set,))
        other.start()
        other.join()
        assert not done.is_set()

    world.at_the_end.append(bring_more)
    world.planner.later(lambda: None)
    assert done.wait(WAIT_S)
    assert not world.failures


def test_who_brings_something_to_an_idle_planner_takes_the_turn(world: World) -> None:
    def in_own_turn() -> bool:
        done: list[str] = []
        world.planner.later(lambda: done.append(threading.current_thread().name))
        return done == [threading.current_thread().name]

    assert wait_for(in_own_turn, "a turn of this thread's own")


def test_the_core_is_asked_when_it_wants_to_be_though_the_thread_went_to_sleep_for_longer(world: World) -> None:
    sleeps_ns = wait_for(lambda: world.planner._asleep_until_ns, "the thread sleeps")
    due_ns = time.monotonic_ns() + 50_000_000
    assert sleeps_ns > due_ns

    def soon() -> None:
        world.core.wakeup_ns = due_ns

    world.planner.later(soon)
    before = len(world.turns)
    wait_for(lambda: "planner" in world.turns[before:], "a turn of its own thread")
    assert time.monotonic_ns() >= due_ns
    world.core.wakeup_ns = None


def test_an_idle_planner_still_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "IDLE_WAKEUP_NS", 1_000_000)
    world = World()
    wait_for(lambda: world.turns.count("planner") >= 2, "turns of its own thread")
    world.planner.stop()


def test_a_turn_that_fails_is_the_last(world: World) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    wait_for(lambda: world.planner.later(fail) or world.failures, "the failure")
    assert [type(error) for error in world.failures] == [ZeroDivisionError]
    turns = len(world.turns)
    world.planner.later(lambda: world.turns.append("after the end"))
    assert len(world.turns) == turns


def test_a_worker_that_there_is_no_thread_for_does_not_end_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again in later turns."""
    world = World()
    info = WorkerInfo(WorkerId("w0"), WorkerEpoch(1), NOBODY, 8, 4, Namespace(b"n"), "m", True)
    with no_threads(monkeypatch):
        world.planner.later(lambda: world.planner._index_message(Workers(CacheEpoch(1), (info,))))
        wait_for(lambda: world.planner._workers._waiting or world.failures, "the worker is listed")
    assert not world.failures
    wait_for(lambda: world.planner._workers._clients, "a session to it")
    world.planner.stop()


def test_nothing_happens_before_the_start() -> None:
    done: list[int] = []
    waiting = Planner(Core(), NOBODY, "test", lambda _: None, lambda _: None)
    waiting.later(lambda: done.append(1))
    assert not done
    waiting.start()
    wait_for(lambda: done == [1], "what was brought before the start")
    waiting.stop()
