"""The core behind its lock: every thread of the edge comes in here, and what the core decided leaves in that order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from coppice.session.frames import Hello, Reject
from coppice_cache.core.base.errors import MessageRefused, SettingsRefused
from coppice_cache.core.index import IndexCore

Outlived = Callable[[Hello], Reject | None]  # a refusal for a peer that knows a later incarnation than this one


class CoreBroken(Exception):
    """The core ended in a bug; this process is about to end."""


class _Entered:
    """A context that holds the lock. One for all: a generator for each message cost more than the lock."""

    __slots__ = ("_locked",)

    def __init__(self, locked: LockedCore) -> None:
        self._locked = locked

    def __enter__(self) -> IndexCore:
        return self._locked.enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._locked.leave(error)


class LockedCore:
    """`let_out` carries out what the core decided, with the lock held; `failed` is called once when the core broke."""

    def __init__(
        self, core: IndexCore, *, let_out: Callable[[IndexCore], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._core = core
        self._let_out = let_out
        self._failed = failed
        self._lock = threading.Lock()
        self._entered = _Entered(self)
        self._broken: BaseException | None = None

    @property
    def core(self) -> IndexCore:
        """For what never changes while it lives, such as its epoch; anything else needs the lock."""
        return self._core

    def replace(self, core: IndexCore) -> IndexCore:
        """With the lock held. Returns the one before."""
        before, self._core = self._core, core
        return before

    @contextmanager
    def held(self) -> Iterator[IndexCore]:
        """The lock and nothing else: no effects are carried out, and a broken core is given, too."""
        with self._lock:
            yield self._core

    @contextmanager
    def looking(self) -> Iterator[IndexCore]:
        """The core, for whoever changes nothing: what is raised inside does not mean that the core broke."""
        with self._lock:
            if self._broken is not None:
                raise CoreBroken(f"the core broke before: {self._broken!r}")
            yield self._core

    def entered(self) -> _Entered:
        """Hold the lock around calls of the core; their effects are carried out at the end.

        Raises CoreBroken once a call ended in a bug: what it left behind must not be built upon.
        """
        return self._entered

    def enter(self) -> IndexCore:
        """Only for what `entered` gives."""
        self._lock.acquire()
        if self._broken is None:
            return self._core
        self._lock.release()
        raise CoreBroken(f"the core broke before: {self._broken!r}")

    def leave(self, error: BaseException | None) -> None:
        """Only for what `entered` gives."""
        try:
            if error is None or isinstance(error, (MessageRefused, SettingsRefused)):
                self._let_out(self._core)
            elif isinstance(error, Exception):
                self._break(error)
        except Exception as bug:
            self._break(bug)
            raise
        finally:
            self._lock.release()

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._failed(error)
