"""The longest times during which everything else waits, while a big tree is built and used.

Collections of garbage are those of the service: its `Collector` decides when. They come within ops. Snapshots and
audits are read in the slices that the service holds its lock for. All is judged by the processor time that it took,
since a busy machine interrupts anybody.
"""

from __future__ import annotations

import gc
from time import thread_time_ns
from types import TracebackType
from typing import Any, Self

from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.rpc.client import WORKER
from coppice_bench.timing import NS_PER_MS
from coppice_cache.core.inspection.audit import Looked
from coppice_cache.edge.events.index_slices import SLICE_BLOCKS
from coppice_cache.edge.service.collector import Collector


class Pauses:
    """Use as a context: it puts the collector of garbage into the service's hands meanwhile."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self._collector = Collector()
        self._collection_began = 0
        self._longest_ns = {"op": 0, "gc": 0, "tick": 0, "snapshot": 0, "audit": 0}

    def __enter__(self) -> Self:
        self._collector.start()
        gc.callbacks.append(self._collection)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.callbacks.remove(self._collection)
        self._collector.stop()

    def _collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = thread_time_ns()
        else:
            self._note("gc", self._collection_began)

    def cache(self, tokens: bytes) -> None:
        """Acquire, publish and release: three ops."""
        began = thread_time_ns()
        lease_id = self._driver.acquire(tokens)
        self._note("op", began)
        began = thread_time_ns()
        self._driver.publish(lease_id, tokens)
        self._note("op", began)
        began = thread_time_ns()
        self._driver.release(lease_id)
        self._note("op", began)

    def tick(self) -> None:
        """What the service's ticker does."""
        driver = self._driver
        driver.core.heard_worker(WORKER, driver.now_ns)
        driver.core.heard_client(driver.session, driver.now_ns)
        began = thread_time_ns()
        driver.core.tick(driver.now_ns)
        driver.core.take_effects()
        self._note("tick", began)

    def report(self) -> dict[str, Any]:
        """Milliseconds by cause, and the longest of those that stop everybody."""
        self._read_snapshot()
        self._audit()
        for _ in range(20):
            self.tick()
        found: dict[str, Any] = {name: longest / NS_PER_MS for name, longest in self._longest_ns.items()}
        return {"longest": max(found.values()), **found}

    def _read_snapshot(self) -> None:
        began = thread_time_ns()
        events, cursor = self._driver.core.snapshot_slice(None, SLICE_BLOCKS)
        self._note("snapshot", began)
        while cursor is not None:
            began = thread_time_ns()
            events, cursor = self._driver.core.snapshot_slice(cursor, SLICE_BLOCKS)
            self._note("snapshot", began)
        del events

    def _audit(self) -> None:
        steps = self._driver.core.audit(Looked())
        began = thread_time_ns()
        for _ in steps:
            self._note("audit", began)
            began = thread_time_ns()

    def _note(self, cause: str, began: int) -> None:
        self._longest_ns[cause] = max(self._longest_ns[cause], thread_time_ns() - began)
