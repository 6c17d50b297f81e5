"""Metrics of the cache service, gathered from the core when they are asked for. docs/METRICS.md lists them.

A domain keeps its own label if it was among the first DOMAINS_MAX that were seen; the others are summed as `other`, so
that the number of series has a bound. Counters of a worker whose epoch died are carried on, so that sums never fall.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coppice_cache.core.base.results import DomainStats, IndexStats, WorkerStats
from coppice_cache.core.base.statements import Statement
from coppice_cache.edge.block_times import BlockTimes
from coppice_cache.edge.service.auditor import Auditor

DOMAINS_MAX = 32
OTHER = "other"
_COUNTERS = ("query_tokens", "hit_tokens", "evicted_blocks")


class CacheMetrics(Collector):
    """`stats` and `statement` are asked once per scrape."""

    def __init__(
        self,
        stats: Callable[[], IndexStats],
        is_degraded: Callable[[], bool],
        spans_dropped: Callable[[], int],
        auditor: Auditor | None = None,
        unproved: Callable[[], dict[str, int]] = dict,
        statement: Callable[[], Statement] | None = None,
    ) -> None:
        self._stats = stats
        self._statement = statement
        self._block_times = BlockTimes(self._label)
        self._is_degraded = is_degraded
        self._spans_dropped = spans_dropped
        self._auditor = auditor
        self._unproved = unproved
        self._lock = threading.Lock()
        self._named: set[str] = set()
        self._seen: dict[tuple[str, int, str, str], int] = {}  # (worker, epoch, domain, counter) -> last value
        self._totals: Tally[tuple[str, str]] = Tally()  # (label, counter)

    def describe(self) -> Iterable[Metric]:
        """Empty: registering must not ask the core."""
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        with self._lock:
            self._count(stats)
            families = [*self._blocks(stats), *self._per_worker(stats), *self._counters(), *self._service(stats)]
            if self._statement is not None:
                families += self._block_times.families(self._statement())
            return families + (self._audits(self._auditor) if self._auditor is not None else [])

    def _label(self, domain: str) -> str:
        if not domain:  # of a statement: domains that are not kept by name
            return OTHER
        if domain not in self._named and len(self._named) < DOMAINS_MAX:
            self._named.add(domain)
        return domain if domain in self._named else OTHER

    def _blocks(self, stats: IndexStats) -> list[Metric]:
        blocks = GaugeMetricFamily(
            "coppice_cache_blocks", "The device's blocks: free, leased, cached, draining.", labels=["worker", "state"]
        )
        domains = GaugeMetricFamily(
            "coppice_cache_domain_blocks",
            "The device's blocks that a domain has: leased, cached, draining.",
            labels=["worker", "domain", "state"],
        )
        names = ["worker", "state"]
        host = GaugeMetricFamily(
            "coppice_cache_host_blocks", "Blocks of the host tier: free, leased, cached.", labels=names
        )
        disk = GaugeMetricFamily(
            "coppice_cache_disk_blocks", "Blocks of the disk tier: free, leased, cached.", labels=names
        )
        copies = GaugeMetricFamily(
            "coppice_cache_copies", "Copies between tiers that are under way.", labels=["worker"]
        )
        for worker in stats.workers:
            copies.add_metric([worker.worker_id], worker.copies)
            for state in ("free", "leased", "cached"):
                host.add_metric([worker.worker_id, state], getattr(worker, f"host_{state}_blocks"))
                disk.add_metric([worker.worker_id, state], getattr(worker, f"disk_{state}_blocks"))
            for state in ("free", "leased", "cached", "draining"):
                blocks.add_metric([worker.worker_id, state], getattr(worker, f"{state}_blocks"))
            for (label, state), count in sorted(self._by_label(worker).items()):
                domains.add_metric([worker.worker_id, label, state], count)
        return [blocks, domains, host, disk, copies]

    def _by_label(self, worker: WorkerStats) -> Tally[tuple[str, str]]:
        tally: Tally[tuple[str, str]] = Tally()
        for domain in worker.domains:
            for state in ("leased", "cached", "draining"):
                tally[self._label(domain.domain), state] += getattr(domain, f"{state}_blocks")
        return tally

    def _per_worker(self, stats: IndexStats) -> list[Metric]:
        wanted: tuple[tuple[str, str, Callable[[WorkerStats], int]], ...] = (
            ("coppice_cache_leases", "Live and draining leases.", lambda worker: worker.leases),
            (
                "coppice_cache_fences_pending",
                "Fences that the worker has not acknowledged.",
                lambda worker: worker.fences,
            ),
            ("coppice_cache_tree_nodes", "Nodes of all radix trees.", lambda worker: worker.nodes),
            (
                "coppice_cache_worker_open",
                "1 when its ledger grants, 0 in the window after a restart.",
                lambda worker: int(worker.open),
            ),
            ("coppice_cache_worker_draining", "1 while it drains.", lambda worker: int(worker.draining)),
            ("coppice_cache_worker_epoch", "Number of its live registration.", lambda worker: worker.worker_epoch),
        )
        families: list[Metric] = []
        for name, text, value in wanted:
            family = GaugeMetricFamily(name, text, labels=["worker"])
            for worker in stats.workers:
                family.add_metric([worker.worker_id], value(worker))
            families.append(family)
        return families

    def _count(self, stats: IndexStats) -> None:
        seen: dict[tuple[str, int, str, str], int] = {}
        for worker in stats.workers:
            for domain in worker.domains:
                self._count_domain(worker, domain, seen)
        self._seen = seen

    def _count_domain(
        self, worker: WorkerStats, domain: DomainStats, seen: dict[tuple[str, int, str, str], int]
    ) -> None:
        for counter in _COUNTERS:
            key = (worker.worker_id, worker.worker_epoch, domain.domain, counter)
            seen[key] = getattr(domain, counter)
            self._totals[self._label(domain.domain), counter] += max(0, seen[key] - self._seen.get(key, 0))

    def _counters(self) -> list[Metric]:
        families: list[Metric] = []
        for counter, name, text in (
            ("query_tokens", "coppice_cache_prefix_query_tokens", "Tokens looked up by granted acquires."),
            ("hit_tokens", "coppice_cache_prefix_hit_tokens", "Tokens found in the cache by granted acquires."),
            ("evicted_blocks", "coppice_cache_evicted_blocks", "Cached blocks given up for others."),
        ):
            family = CounterMetricFamily(name, text, labels=["domain"])
            for (label, which), total in sorted(self._totals.items()):
                if which == counter:
                    family.add_metric([label], total)
            families.append(family)
        return families

    def _audits(self, auditor: Auditor) -> list[Metric]:
        ended = CounterMetricFamily("coppice_cache_audits", "Audits that ended.", labels=["result"])
        for holds, result in ((True, "holds"), (False, "broken")):
            ended.add_metric([result], auditor.num_ended[holds])
        longest_s = auditor.last.longest_slice_us / 1e6 if auditor.last is not None else 0.0
        return [
            ended,
            GaugeMetricFamily(
                "coppice_cache_audit_broken",
                "1 when the last audit found a broken invariant.",
                value=int(bool(auditor.problem)),
            ),
            GaugeMetricFamily(
                "coppice_cache_audit_longest_slice_seconds",
                "Longest time for which the last audit held everything up.",
                value=longest_s,
            ),
        ]

    def _service(self, stats: IndexStats) -> list[Metric]:
        unproved = CounterMetricFamily(
            "coppice_cache_unproved_claims",
            "Epochs that nobody vouches for: of a session, a registration, Redis.",
            labels=["of"],
        )
        for kind, count in self._unproved().items():
            unproved.add_metric([kind], count)
        return [
            unproved,
            GaugeMetricFamily(
                "coppice_cache_sessions", "Sessions of schedulers and other clients.", value=stats.sessions
            ),
            GaugeMetricFamily("coppice_cache_epoch", "Incarnation of this service.", value=stats.cache_epoch),
            GaugeMetricFamily(
                "coppice_cache_degraded", "1 while /readyz lists reasons.", value=int(self._is_degraded())
            ),
            CounterMetricFamily(
                "coppice_cache_spans_dropped", "Trace spans that nobody took in time.", value=self._spans_dropped()
            ),
        ]
