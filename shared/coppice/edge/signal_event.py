"""An event that a signal handler may set."""

from __future__ import annotations

import math
import time
from queue import Empty, SimpleQueue

LOOK_AGAIN_S = 0.25


class SignalEvent:
    """`threading.Event` for one waiting thread, set by other threads and by handlers of signals.

    A handler runs on the main thread between any two instructions. `Event.set` takes a lock that the same thread may
    hold in `wait` or `clear`: the process then hangs, deaf to further signals. `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wakes.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        """What is set during this call stays set or is gone; it is set after the call only if `wait` says so."""
        self._is_set = False
        while not self._wakes.empty():
            self._wakes.get()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is set or time is up. Returns whether it is set; False comes early where `clear` met a `set`."""
        # A signal that the kernel gives to another thread, or that comes after the interpreter last looked and before
        # this thread sleeps in the lock, does not wake it: the handler runs when the interpreter looks again.
        ends = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set:
            left = ends - time.monotonic()
            try:
                self._wakes.get(timeout=max(0.0, min(left, LOOK_AGAIN_S)))
                break
            except Empty:
                if left <= LOOK_AGAIN_S:
                    break
        return self._is_set
