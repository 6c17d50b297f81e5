"""Metrics of a disk tier. docs/METRICS.md lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class WatchedPool(Protocol):
    """What a `DiskPool` says of itself."""

    num_lost: int

    @property
    def takes_blocks(self) -> bool: ...


class DiskMetrics(Collector):
    """Of a worker that was told to have a disk tier; `pool` is None where it could not be had."""

    def __init__(self, pool: WatchedPool | None) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        pool = self._pool
        yield GaugeMetricFamily(
            "coppice_worker_disk_up",
            "1 while blocks can be stored on the disk; 0 after an error until one is stored, or without a folder.",
            value=0 if pool is None else int(pool.takes_blocks),
        )
        yield CounterMetricFamily(
            "coppice_worker_disk_lost_blocks",
            "Blocks whose file was gone or wrong when it was read.",
            value=0 if pool is None else pool.num_lost,
        )
