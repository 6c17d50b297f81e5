"""Recovery as the process sees it: load the log of before, then keep one; and how that goes, as metrics.

coppice_cache_replay_blocks_total{outcome}     blocks of the log that was loaded: replayed, replayed_to_host,
                                               refused_generation, refused_seal, refused_parent, refused_domain,
                                               unclaimed
coppice_cache_replay_leases_total{outcome}     re-attached leases: pinned onto a replayed node, publishing again
coppice_cache_recovery_log_lag_events          changes of the trees that are not in Redis yet
coppice_cache_recovery_log_age_seconds         since the last whole snapshot; absent before the first
coppice_cache_recovery_log_bytes               of the stream that is written
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable
from dataclasses import fields
from typing import cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coppice.ids import CacheEpoch
from coppice_cache.core.inspection.snapshots import Cursor
from coppice_cache.core.state.replay import ReplayCounts
from coppice_cache.edge.durability.log_codec import LogKeys
from coppice_cache.edge.durability.log_store import connect_log, load
from coppice_cache.edge.durability.recovery_log import LogStatus, RecoveryLog, Slice
from coppice_cache.edge.service.service import IndexService

_log = logging.getLogger("coppice.cache")


class Recovery:
    """`load` comes before the ports open, `stop` before the service closes; any thread may ask for the rest."""

    def __init__(self, redis_url: str, password: str, service: IndexService) -> None:
        self._client = connect_log(redis_url, password)
        self._keys = LogKeys.derive(*service.settings.seal_keys)
        self._service = service
        self._writer = RecoveryLog(self._client, self._keys, _Index(service), service.hub)

    def load(self) -> None:
        """Never raises for what stands in Redis: what cannot be read is not there."""
        started_s = time.monotonic()
        was_enabled = gc.isenabled()
        gc.disable()  # a million new objects, none of them garbage: looking for some would take longer than the rest
        try:
            loaded = load(self._client, self._keys)
            with self._service.entered() as core:
                core.load_replay(loaded.by_worker)
        finally:
            if was_enabled:
                gc.enable()
        took_s = time.monotonic() - started_s
        if loaded.problem:
            told = (loaded.problem, loaded.num_records)
            _log.warning("recovery log: %s; what follows is ignored, %d records before it are used", *told)
        _log.info("recovery log: %d blocks of %d workers in %.2f s", loaded.num_blocks, len(loaded.by_worker), took_s)

    def start(self) -> None:
        self._writer.start()

    def stop(self) -> None:
        self._writer.stop()

    @property
    def problem(self) -> str:
        return self._writer.problem

    def status(self) -> LogStatus:
        return self._writer.status()

    def replay_counts(self) -> ReplayCounts:
        with self._service.entered() as core:
            return core.replay_counts


class _Index:
    """What the log is made of."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    @property
    def cache_epoch(self) -> CacheEpoch:
        return self._service.cache_epoch

    @property
    def is_replaying(self) -> bool:
        with self._service.entered() as core:
            return core.is_replaying

    def snapshot_slice(self, cursor: object | None, max_blocks: int) -> Slice:
        with self._service.entered() as core:
            events, next_cursor = core.snapshot_slice(cast("Cursor | None", cursor), max_blocks)
            return Slice(tuple(events), self._service.hub.position, next_cursor)


class RecoveryMetrics(Collector):
    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def describe(self) -> Iterable[Metric]:
        """Empty: registering must not ask the core."""
        return ()

    def collect(self) -> Iterable[Metric]:
        counts, status = self._recovery.replay_counts(), self._recovery.status()
        blocks = CounterMetricFamily(
            "coppice_cache_replay_blocks",
            "Blocks of the recovery log, by what became of them at the start.",
            labels=["outcome"],
        )
        leases = CounterMetricFamily(
            "coppice_cache_replay_leases",
            "Leases that came back after a restart, by what became of them.",
            labels=["outcome"],
        )
        for name in (field.name for field in fields(counts) if field.name != "offered"):
            family = leases if name.startswith("leases_") else blocks
            family.add_metric([name.removeprefix("leases_")], getattr(counts, name))
        lag = GaugeMetricFamily(
            "coppice_cache_recovery_log_lag_events",
            "Events of the recovery log that are not in Redis yet.",
            value=status.lag_events,
        )
        size = GaugeMetricFamily(
            "coppice_cache_recovery_log_bytes", "Size of the recovery log.", value=status.num_bytes
        )
        if status.snapshot_age_s is None:
            return [blocks, leases, lag, size]
        age = GaugeMetricFamily(
            "coppice_cache_recovery_log_age_seconds", "Age of the recovery log's snapshot.", value=status.snapshot_age_s
        )
        return [blocks, leases, lag, size, age]
