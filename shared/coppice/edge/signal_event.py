"""An event that a signal handler may set."""

from __future__ import annotations

from queue import Empty, SimpleQueue


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
        if not self._is_set:
            try:
                self._wakes.get(timeout=timeout_s)
            except Empty:
                pass
        return self._is_set
