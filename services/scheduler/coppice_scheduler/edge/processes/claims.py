"""Calls with an `Idempotency-Key`, of all front doors: what they ask of the table, and what it tells them.

It is the parent's, so that it outlives planners: an answer that was given once is not computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from coppice_scheduler.edge.base.idempotency import Claim, Claimed, Settled
from coppice_scheduler.edge.processes.answer_table import AnswerTable, Told

Tell = Callable[[Claimed], None]  # one front door


class Claims:
    """Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = AnswerTable()
        self._doors: dict[int, Tell] = {}

    def open_door(self, number: int, tell: Tell) -> None:
        with self._lock:
            self._doors[number] = tell

    def close_door(self, number: int) -> None:
        """Its calls at work are lost."""
        with self._lock:
            self._doors.pop(number, None)
            self._tell(self._table.close_door(number))

    def heard(self, number: int, message: Claim | Settled) -> None:
        """What front door `number` says of a call: that it came, or that it has ended."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if isinstance(message, Claim):
                self._tell(self._table.claim(number, message, now_ns))
            else:
                self._tell(self._table.settle(number, message, now_ns))

    def keep_tenants(self, tenants: Collection[str]) -> None:
        """Only these are left; what others had is gone."""
        with self._lock:
            self._tell(self._table.keep_tenants(tenants))

    def expire(self) -> None:
        """Forget answers that are old. To be called now and then."""
        with self._lock:
            self._table.expire(time.monotonic_ns())

    def _tell(self, told: list[Told]) -> None:
        for number, claimed in told:
            if number in self._doors:
                self._doors[number](claimed)
