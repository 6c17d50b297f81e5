"""Buckets of histograms name the trace of a request that fell into them, in what OpenMetrics shows."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from coppice.request_log.record import RequestRecord, encoded
from coppice.request_log.writer import PREFIX, SUFFIX
from coppice.telemetry.metrics_server import openmetrics_page
from coppice_scheduler.edge.base.metrics import CappedLabels, FrontDoorMetrics
from coppice_scheduler.edge.request_log.exemplars import VALUES_S, WithExemplars

TTFT, WHOLE, QUEUE = VALUES_S


def record(trace: str, second: int = 0, tenant: str = "a", status: int = 200, **times_ms: float) -> RequestRecord:
    times = {"ttft_ms": 40.0, "total_ms": 400.0, "queue_ms": 3.0, **times_ms}
    queued_ms = times["queue_ms"]
    stages = (("queued", 0.0, queued_ms, "", 0), ("prefill", queued_ms, queued_ms + 9, "", 0))
    at = f"2026-01-31T12:00:{second:02}.250Z"
    return RequestRecord(
        at, f"r-{trace}", "POST /v1/x", status, "stop", tenant=tenant, trace=trace, stages=stages, **times
    )


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = CollectorRegistry()
        self.metrics = FrontDoorMetrics(self.registry, "demo", CappedLabels(1))

    def write(self, *records: RequestRecord) -> None:
        (self.folder / f"{PREFIX}2026-01-31-1{SUFFIX}").write_bytes(b"".join(encoded(one) for one in records))

    def exemplars(self, name: str) -> dict[tuple[str, str], Exemplar]:
        """By tenant and bucket, as a strict reader of the page finds them."""
        page = openmetrics_page(WithExemplars(self.registry, str(self.folder))).decode()
        return {
            (sample.labels["tenant"], sample.labels["le"]): sample.exemplar
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.exemplar and family.name == name
        }

    def traces(self, name: str) -> dict[tuple[str, str], str]:
        return {place: one.labels["trace_id"] for place, one in self.exemplars(name).items()}


def test_a_bucket_names_the_newest_trace_that_fell_into_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metrics.first_token("a", 0.04, 10)
    world.write(
        record("old", 1, ttft_ms=39.0),
        record("new", 2, ttft_ms=40.0),
        record("slow", 3, ttft_ms=99_000.0, total_ms=99_500.0, queue_ms=700.0),
    )
    assert world.traces(TTFT) == {("a", "0.04"): "new", ("a", "+Inf"): "slow"}
    assert world.traces(WHOLE) == {("a", "0.5"): "new", ("a", "120.0"): "slow"}
    assert world.traces(QUEUE) == {("a", "0.005"): "new", ("a", "0.8"): "slow"}
    exemplar = world.exemplars(TTFT)["a", "0.04"]
    assert (exemplar.value, float(exemplar.timestamp or 0)) == (0.04, 1769860802.25)


def test_tenants_without_a_label_of_their_own_share_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    for tenant in ("a", "b"):
        world.metrics.first_token(tenant, 0.04, 10)
    world.write(record("first", tenant="a"), record("second", tenant="b"))
    assert world.traces(TTFT) == {("a", "0.04"): "first", ("other", "0.04"): "second"}


def test_what_was_not_traced_or_not_counted_is_no_exemplar(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metrics.first_token("a", 0.04, 10)
    world.write(record(""), record("refused", status=429, ttft_ms=0.0))
    for name in VALUES_S:
        assert world.exemplars(name) == {}


def test_a_line_that_is_no_record_of_ours_hides_no_metric(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metrics.first_token("a", 0.04, 10)
    world.write(replace(record("odd"), at="yesterday"), record("well", ttft_ms=39.0), record("back", ttft_ms=-5.0))
    assert world.traces(TTFT) == {("a", "0.04"): "well"}


def test_values_are_as_without(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.metrics.first_token("a", 0.04, 10)
    world.write(record("one"))
    seen = [
        sample._replace(exemplar=None)
        for family in WithExemplars(world.registry, str(tmp_path)).collect()
        for sample in family.samples
    ]
    assert seen == [sample for family in world.registry.collect() for sample in family.samples]
