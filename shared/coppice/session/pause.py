"""Was this process paused? Expiry follows the judge's monotonic clock; a judge that slept must not judge yet."""

from __future__ import annotations


class PauseGuard:
    """Watches the gaps between a service's own ticks.

    `observe` answers by how many nanoseconds all deadlines move: 0 normally, the gap when it was longer than
    `tolerated_ns`.
    """

    __slots__ = ("_last_ns", "_tolerated_ns")

    def __init__(self, now_ns: int, tolerated_ns: int) -> None:
        assert tolerated_ns > 0
        self._last_ns = now_ns
        self._tolerated_ns = tolerated_ns

    def observe(self, now_ns: int) -> int:
        gap_ns = now_ns - self._last_ns
        self._last_ns = now_ns
        return gap_ns if gap_ns > self._tolerated_ns else 0
