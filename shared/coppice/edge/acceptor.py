"""Accepts connections, on a thread of its own, for as long as its process lives.

a connection --> begin(connection, peer, over)   ...   over(): its place is free
     |    +-- out of descriptors or of threads: closed, and accepting goes on after a pause
     +-- all places are taken: it waits in the kernel's queue
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_log = logging.getLogger(__name__)
PAUSE_S = 0.5

Begin = Callable[[socket.socket, Any, Callable[[], None]], None]


class Acceptor:
    """Accepts from `start` on; `listener` listens already, and is this object's from now on.

    `begin` is called with the connection, the address of its peer and `over`, which it arranges to be called once, when
    the connection takes no place any more. It returns at once. Where it raises, the connection is closed.
    `most`: connections at once. `what`: of what kind they are, for the log.
    """

    def __init__(self, listener: socket.socket, begin: Begin, *, most: int, what: str) -> None:
        self._listener = listener
        self._begin = begin
        self._most = most
        self._what = what
        self._places = threading.BoundedSemaphore(most)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"accepts {what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Accept nobody any more. Connections that were begun stay."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._listener.close()

    def _accept(self) -> None:
        while self._take_place():
            try:
                self._next()
            except (
                OSError,
                RuntimeError,
            ) as error:  # out of descriptors or of threads: those that end give theirs back
                self._places.release()
                if not self._closing.is_set():
                    _log.warning("a connection could not be accepted, of %s: %s", self._what, error)
                self._closing.wait(PAUSE_S)

    def _next(self) -> None:
        connection, peer = self._listener.accept()
        try:
            self._begin(connection, peer, self._places.release)
        except BaseException:
            connection.close()
            raise

    def _take_place(self) -> bool:
        """False: it is closing."""
        if not self._places.acquire(blocking=False):
            _log.warning("%d connections of %s are open, the most there may be; others wait", self._most, self._what)
            while not self._places.acquire(timeout=PAUSE_S):
                if self._closing.is_set():
                    return False
        if self._closing.is_set():
            self._places.release()
            return False
        return True
