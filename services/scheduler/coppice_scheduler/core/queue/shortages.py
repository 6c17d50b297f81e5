"""What keeps everybody who waits from getting on, while it does: no worker, no running slot, no free block.

Most of those who wait are never looked at one by one, as somebody of their tenant, or of another one, goes first. So
what they wait for is noted once for all, and each is told when its wait is over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable

import numpy as np

from coppice.handles import handles_array
from coppice.ids import DomainId
from coppice.request_log.stages import History, Stage, StageKind
from coppice_scheduler.core.state.counts import Counts
from coppice_scheduler.core.state.workers import Worker

PAST_MAX = 256  # who waited for longer than these is told of the later ones
LOOK_AGAIN_NS = 1_000_000_000  # who holds most may be another one by then

Holder = tuple[str, int]  # who held most, and how much


class Shortages:
    def __init__(self) -> None:
        self._past: deque[Stage] = deque(maxlen=PAST_MAX)
        self._kind: StageKind | None = None
        self._since_ns = 0
        self._holder: Holder = ("", 0)

    def lasts(self, kind: StageKind, now_ns: int, holder: Callable[[], Holder] = lambda: ("", 0)) -> None:
        """From now on everybody waits for this, if they do not already. `holder` is asked once a second at most."""
        if kind is self._kind and now_ns - self._since_ns < LOOK_AGAIN_NS:
            return
        self.over(now_ns)
        self._kind, self._since_ns, self._holder = kind, now_ns, holder()

    def over(self, now_ns: int) -> None:
        """Nobody who waits lacks anything but its turn."""
        if self._kind is not None:
            if now_ns > self._since_ns:
                self._past.append(self._lasting(now_ns))
            self._kind = None

    def happened(self, kind: StageKind, now_ns: int, blocker: str, amount: int) -> None:
        """What everybody is told who waits now."""
        if self._kind is not None and now_ns > self._since_ns:
            self._past.append(self._lasting(now_ns))
            self._since_ns = now_ns
        self._past.append(Stage(kind, now_ns, now_ns, blocker, amount))

    def tell(self, history: History, now_ns: int, but: Container[StageKind] = ()) -> None:
        """What everybody waited for since the stage of `history` that lasts began; nothing of the kinds in `but`."""
        since_ns = history.since_ns
        if since_ns >= now_ns:
            return
        found = []
        for stage in reversed(self._past):
            if stage.end_ns < since_ns:
                break
            found.append(stage)
        if self._kind is not None:
            found.insert(0, self._lasting(now_ns))
        for stage in reversed(found):
            if stage.kind not in but:
                history.was(stage)

    def _lasting(self, now_ns: int) -> Stage:
        assert self._kind is not None
        return Stage(self._kind, self._since_ns, now_ns, *self._holder)


def most_slots(counts: Counts) -> Holder:
    """The tenant that holds most running slots, and how many."""
    held = counts.tenant_running + counts.tenant_asking
    return max(held.items(), key=lambda item: (item[1], item[0]), default=("", 0))


def most_blocks(workers: Iterable[Worker], but: DomainId | None = None) -> Holder:
    """The domain whose running requests hold most blocks of these workers, and how many. `but`: not this one."""
    held: Counter[str] = Counter()
    for worker in workers:
        handles: dict[DomainId, bytearray] = {}
        for sequence in worker.running.values():
            lease = sequence.lease
            handles.setdefault(lease.domain, bytearray()).extend(lease.shared + lease.owned)
        for domain, packed in handles.items():
            held[domain] += len(np.unique(handles_array(bytes(packed))))
    held.pop(but or "", None)
    return max(held.items(), key=lambda item: (item[1], item[0]), default=("", 0))
