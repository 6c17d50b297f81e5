"""Whether this scheduler and the cache service go by the same tenants file.

    versions equal, or not told yet  -->  agree
            | ^                            a line, when it was told before
            v |
    versions differ  --longer than GRACE_S-->  told: a line, a note for operators, coppice_tenants_agree 0

A file that changes reaches the two services one after the other, so they differ for a moment at each change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coppice.tenants.watch import TenantsWatch

_log = logging.getLogger("coppice.tenants")
GRACE_S = 5.0  # each service looks once a second, and takes a file at the second look at the latest
_TO_DO = "give both the same file; a service that does not look at it hears SIGHUP"


class TenantsAgreement(Collector):
    """`tend` belongs to one thread; any may read notes and collect metrics.

    `cache_version`: of the file at the cache service; empty where it has none, None until it has said so.
    """

    def __init__(self, watch: TenantsWatch | None, cache_version: Callable[[], str | None]) -> None:
        self._watch = watch
        self._cache_version = cache_version
        self._differ_since_s: float | None = None
        self._is_told = False

    def tend(self, now_s: float) -> None:
        if self._agree():
            if self._is_told:
                _log.info("the tenants files agree again: %s here and at the cache service", self._ours())
            self._differ_since_s, self._is_told = None, False
        elif self._differ_since_s is None:
            self._differ_since_s = now_s
        elif not self._is_told and now_s - self._differ_since_s >= GRACE_S:
            self._is_told = True
            _log.warning("%s", self._difference())

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for an operator who asks whether the service is ready: of the file, and of the difference."""
        own = self._watch.notes if self._watch is not None else ()
        return (*own, self._difference()) if self._is_told else own

    def collect(self) -> Iterable[Metric]:
        text = "0 while the cache service has gone by another version of the tenants file for some seconds."
        if self._cache_version() is not None:
            yield GaugeMetricFamily("coppice_tenants_agree", text, value=int(not self._is_told))

    def _agree(self) -> bool:
        theirs = self._cache_version()
        return theirs is None or theirs == (self._watch.directory.version if self._watch is not None else "")

    def _difference(self) -> str:
        theirs = _words(self._cache_version() or "")
        return f"the tenants files differ: {self._ours()} here, {theirs} at the cache service; {_TO_DO}"

    def _ours(self) -> str:
        return (
            f"{_words(self._watch.directory.version)} of {self._watch.path}" if self._watch is not None else _words("")
        )


def _words(version: str) -> str:
    return f"version {version}" if version else "none"
