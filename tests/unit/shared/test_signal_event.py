"""A signal at any instruction of an event's methods neither hangs the process nor is it lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from coppice.edge.signal_event import SignalEvent

LIMIT_S = 60.0


def signal_at(number: int, method: str) -> bool:
    """Call `method` of an event; the handler of a signal that comes at the method's instruction of that number sets
    it. False: the method has fewer instructions. Raises AssertionError when the signal is lost."""
    event = SignalEvent()
    signal.signal(signal.SIGUSR1, lambda *_: event.set())
    left = number

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if what == "opcode":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    sys._getframe().f_trace_opcodes = True  # before 3.12.4 settrace looks whether anybody wants opcodes at all
    sys.settrace(trace)
    try:
        event.wait(0.001) if method == "wait" else getattr(event, method)()
    finally:
        sys.settrace(None)
    came = left <= 0
    if came and method == "wait":
        assert event.wait(0.001), f"the signal at instruction {number} is lost"
    return came


def interrupt_everywhere(method: str) -> None:
    number = 1
    while signal_at(number, method):
        number += 1
    assert number > 4, f"{number - 1} instructions of {method} were interrupted"


@pytest.mark.parametrize("method", ["wait", "clear", "set"])
def test_a_signal_may_come_at_any_instruction(method: str) -> None:
    # In a process of its own: a hang of the main thread in a lock cannot be ended from inside.
    code = f"from {__name__} import interrupt_everywhere; interrupt_everywhere({method!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def signal_to_another_thread() -> None:
    """The kernel may hand a signal of the process to any of its threads; the main thread waits all the while."""
    event = SignalEvent()
    signal.signal(signal.SIGUSR1, lambda *_: event.set())
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    threading.Timer(0.1, signal.pthread_kill, (other.ident, signal.SIGUSR1)).start()
    assert event.wait()


def test_a_signal_that_another_thread_takes_wakes_the_one_that_waits() -> None:
    code = f"from {__name__} import signal_to_another_thread; signal_to_another_thread()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_it_is_set_cleared_and_waited_for() -> None:
    event = SignalEvent()
    assert not event.is_set()
    assert not event.wait(0.001)
    setter = threading.Timer(0.01, event.set)
    setter.start()
    assert event.wait()
    assert event.is_set()
    assert event.wait()
    setter.join()
    event.clear()
    assert not event.is_set()
    assert not event.wait(0.001)
