"""Exemplars of histograms: in each bucket the newest request that fell into it and has a trace.

    metrics of all front doors --\
                                  +--> ..._bucket{le="0.5"} 17 # {trace_id="9b1c..."} 0.41 1767225601.2
    records of the newest requests /

Front doors count in files that keep no exemplars. Their records of requests have all that one needs, so nothing more is
kept for it. A record's times begin with the first byte of its call, and those of the histograms when it was read: they
differ by what a body took to arrive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from prometheus_client import Metric
from prometheus_client.samples import Exemplar, Sample

from coppice.request_log.causes import NS_PER_S
from coppice.request_log.phases import phases_of
from coppice.request_log.reader import newest
from coppice.request_log.record import RequestRecord, stages_of
from coppice.telemetry.metrics_server import Collected
from coppice_scheduler.edge.base.metrics import OTHER

RECORDS_MAX = 1000
TAIL_BYTES = 512 * 1024  # of a file, some five hundred requests
BYTES_MAX = 8 * 1024 * 1024  # of all of them, in a scrape

# A histogram by tenant, and what of a record it counts, in seconds; 0: not counted.
VALUES_S: Mapping[str, Callable[[RequestRecord], float]] = {
    "vllm:time_to_first_token_seconds": lambda record: record.ttft_ms / 1e3,
    "vllm:e2e_request_latency_seconds": lambda record: record.total_ms / 1e3 if record.status < 400 else 0.0,
    "vllm:request_queue_time_seconds": lambda record: (
        phases_of(stages_of(record)).queue_ns / NS_PER_S if record.status < 400 and record.stages else 0.0
    ),
}

_Buckets = dict[tuple[str, float], Exemplar]  # by tenant and upper bound


class WithExemplars:
    def __init__(self, registry: Collected, folder: str) -> None:
        """`folder`: where front doors write records."""
        self._registry = registry
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        records: list[RequestRecord] | None = None
        for metric in self._registry.collect():
            value_s = VALUES_S.get(metric.name)
            if value_s is not None:
                if records is None:
                    records = newest(self._folder, RECORDS_MAX, traced=True, tail_bytes=TAIL_BYTES, bytes_max=BYTES_MAX)
                metric.samples = _with_exemplars(metric.samples, records, value_s)
            yield metric


def _with_exemplars(
    samples: Sequence[Sample], records: Iterable[RequestRecord], value_of: Callable[[RequestRecord], float]
) -> list[Sample]:
    bounds = sorted({float(sample.labels["le"]) for sample in samples if "le" in sample.labels})
    tenants = {sample.labels["tenant"] for sample in samples}
    found: _Buckets = {}
    for record in records:  # the newest first
        value_s = value_of(record)
        if value_s > 0 and bounds:
            tenant = record.tenant if record.tenant in tenants else OTHER
            place = (tenant, bounds[bisect_left(bounds, value_s)])
            if place not in found:
                with suppress(ValueError):  # its time is none
                    found[place] = Exemplar({"trace_id": record.trace}, value_s, _timestamp(record.at))
    return [
        sample._replace(exemplar=found.get((sample.labels["tenant"], float(sample.labels["le"]))))
        if "le" in sample.labels
        else sample
        for sample in samples
    ]


def _timestamp(at: str) -> float:
    """Seconds since 1970."""
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
