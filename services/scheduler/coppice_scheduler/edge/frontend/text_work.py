"""Work on text beside the loop: tokenising, templates, detokenising, and reading of large bodies.

    run(tenant, size, work)   size <= SHORT ---> short lane   [ t1: . . ] [ t2: . ] --> threads
                                     more ----> long lane    [ t1: . . . ] [ t3: . ] --> threads
                                                              a line for each tenant; lines take turns

What is short never waits behind what is long. In the long lane a tenant has one piece of work in a thread at a time, so
one that sends only long texts leaves the other threads to others. Work that nobody waits for any more leaves its line.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from coppice_scheduler.edge.base.errors import ApiError, ErrorKind

SHORT_SIZE = 64 * 1024  # bytes or characters: some 20 ms of tokenising
SHORT_THREADS = 2
LONG_THREADS = 2
WAITING_MAX = 1024  # of one tenant in one lane
RETRY_AFTER_MS = 1000

T = TypeVar("T")


class TextWork:
    """Used from one event loop."""

    def __init__(
        self,
        *,
        short_threads: int = SHORT_THREADS,
        long_threads: int = LONG_THREADS,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._short = _Lane("short text", short_threads, short_threads, waiting_max)
        self._long = _Lane("long text", long_threads, 1, waiting_max)

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done in a thread when it is the tenant's turn. `size`: bytes or characters.

        Raises ApiError (BUSY) where too much of the tenant's waits. Cancelling it takes work out that has not begun.
        """
        lane = self._short if size <= SHORT_SIZE else self._long
        answer: T = await lane.run(tenant, work)
        return answer


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    context: Context = field(default_factory=copy_context)  # of the request: what is logged in the thread says which


class _Lane:
    def __init__(self, name: str, threads: int, at_once_max: int, waiting_max: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._num_free = threads
        self._at_once_max = at_once_max  # of one tenant
        self._waiting_max = waiting_max
        self._lines: dict[str, deque[_Job]] = {}  # in the order of their turns; none is empty
        self._running: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], Any]) -> Any:
        line = self._lines.setdefault(tenant, deque())
        if len(line) >= self._waiting_max:
            message = f"tenant {tenant} has {self._waiting_max} texts waiting to be read, its maximum"
            raise ApiError(ErrorKind.BUSY, message, code="too_many_texts", retry_after_ms=RETRY_AFTER_MS)
        job = _Job(work, asyncio.get_running_loop().create_future())
        line.append(job)
        self._begin()
        try:
            return await job.result
        except asyncio.CancelledError:
            self._leave(tenant, job)
            raise

    def _begin(self) -> None:
        """Give free threads to whose turn it is."""
        loop = asyncio.get_running_loop()
        while self._num_free and (tenant := self._next()) is not None:
            line = self._lines.pop(tenant)
            job = line.popleft()
            if line:
                self._lines[tenant] = line  # its next turn comes after those of all others
            self._num_free -= 1
            self._running[tenant] += 1
            done = loop.run_in_executor(self._threads, job.context.run, job.work)
            done.add_done_callback(partial(self._ended, tenant, job))

    def _next(self) -> str | None:
        return next((tenant for tenant in self._lines if self._running[tenant] < self._at_once_max), None)

    def _ended(self, tenant: str, job: _Job, done: asyncio.Future[Any]) -> None:
        self._num_free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        error = done.exception()
        if not job.result.done():
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._begin()

    def _leave(self, tenant: str, job: _Job) -> None:
        line = self._lines.get(tenant)
        if line is None or job not in line:
            return  # a thread has it, and keeps its place until it is done
        line.remove(job)
        if not line:
            del self._lines[tenant]
