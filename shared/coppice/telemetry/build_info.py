"""`coppice_build_info`: which version of which service answers a scrape."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coppice import __version__


class BuildInfo(Collector):
    """Register one in each registry that is scraped."""

    def __init__(self, service: str, core: str = "") -> None:
        """`core`: what `coppice.compiled.kind_of` says of the service's package, if it has one."""
        self._labels = (service, __version__, platform.python_version(), core)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "coppice_build_info",
            "1, by service, version, Python, and whether its core is compiled or source.",
            labels=["service", "version", "python", "core"],
        )
        family.add_metric(self._labels, 1)
        yield family
