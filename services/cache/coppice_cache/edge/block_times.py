"""Statements as counters, by domain and tier; docs/METRICS.md lists them.

The core's totals begin anew with each of its incarnations. Those of one that was replaced in this process are carried
on from the last scrape, so that counters do not fall.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from coppice_cache.core.base.statements import DomainStatement, PoolStatement, Statement, total

NS_PER_S = 1e9
_FAMILIES = {
    "held": ("Blocks times seconds that a domain held: leased, cached, draining.", ("domain", "tier", "state")),
    "guaranteed": ("Blocks times seconds that were guaranteed to a domain.", ("domain", "tier")),
    "borrowed": ("Blocks times seconds that a domain held beyond its guarantee.", ("domain", "tier")),
    "lent": ("Blocks times seconds of a domain's guarantee that others held.", ("domain", "tier")),
    "unheld": ("Blocks times seconds of no domain: free; unclaimed after a restart of the cache.", ("tier", "state")),
    "pool": ("Blocks times seconds of all workers' pools: held and unheld.", ("tier",)),
}
_DISPLACED = "displaced"
_Key = tuple[str, tuple[str, ...]]  # which counter, and its labels


class BlockTimes:
    """`label` says under which name a domain is counted. Not for several threads at once."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self._label = label
        self._cache_epoch = 0
        self._carried: Tally[_Key] = Tally()
        self._last: Tally[_Key] = Tally()

    def families(self, statement: Statement) -> list[Metric]:
        if statement.cache_epoch != self._cache_epoch:
            self._cache_epoch = statement.cache_epoch
            self._carried = self._last
        found = Tally(self._carried)
        for pool in total((*statement.pools, *statement.ended)):
            for key, value in self._counted(pool):
                found[key] += value
        self._last = found
        return [*(self._seconds(name) for name in _FAMILIES), self._displaced()]

    def _counted(self, pool: PoolStatement) -> Iterator[tuple[_Key, int]]:
        tier = pool.tier.name.lower()
        yield ("pool", (tier,)), pool.time.pool_block_ns
        yield ("unheld", (tier, "free")), pool.time.free_block_ns
        yield ("unheld", (tier, "unclaimed")), pool.time.unclaimed_block_ns
        for domain in pool.domains:
            yield from self._of_domain(self._label(domain.domain), tier, domain)

    def _of_domain(self, label: str, tier: str, domain: DomainStatement) -> Iterator[tuple[_Key, int]]:
        for state in ("leased", "cached", "draining"):
            yield ("held", (label, tier, state)), getattr(domain, f"{state}_block_ns")
        for name in ("guaranteed", "borrowed", "lent"):
            yield (name, (label, tier)), getattr(domain, f"{name}_block_ns")
        yield (_DISPLACED, (label,)), domain.displaced_blocks

    def _seconds(self, name: str) -> Metric:
        text, labels = _FAMILIES[name]
        family = CounterMetricFamily(f"coppice_cache_{name}_block_seconds", text, labels=labels)
        for (counter, values), value in sorted(self._last.items()):
            if counter == name:
                family.add_metric(values, value / NS_PER_S)
        return family

    def _displaced(self) -> Metric:
        family = CounterMetricFamily(
            "coppice_cache_displaced_blocks",
            "Cached blocks that a domain gave up for blocks of other domains.",
            labels=["domain"],
        )
        for (counter, values), value in sorted(self._last.items()):
            if counter == _DISPLACED:
                family.add_metric(values, value)
        return family
