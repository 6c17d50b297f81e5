"""docs/METRICS.md, of what the services register: `make metrics-reference` writes it, `make check` compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from coppice.ids import CacheEpoch, DomainId
from coppice.telemetry.build_info import BuildInfo
from coppice.tenants.agreement import TenantsAgreement
from coppice.tenants.watch import TenantsWatch
from coppice_audit.watch import AuditMetrics
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_cache.core.state.replay import ReplayCounts
from coppice_cache.edge.durability.recovery import RecoveryMetrics
from coppice_cache.edge.durability.recovery_log import LogStatus
from coppice_cache.edge.metrics import CacheMetrics
from coppice_cache.edge.service.auditor import Auditor
from coppice_cache.engine_index.http import IngestMetrics
from coppice_scheduler.edge.base.engine import NO_STATS
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.planner.metrics import PlannerCollector
from coppice_scheduler.edge.request_log.call_metrics import CallMetrics
from coppice_worker.disk.metrics import DiskMetrics
from coppice_worker.edge.metrics import WorkerMetrics

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "METRICS.md"
_EXAMPLE_TENANTS = ROOT / "deploy" / "tenants.example.yaml"
_MODEL = "demo"

_HEAD = """# Metrics

Written by `make metrics-reference` from what the services register; [OPERATING.md](OPERATING.md#metrics) says where
each is scraped, [ALERTS.md](ALERTS.md) what is worth an alarm. A histogram has series that end in `_bucket`, `_sum` and
`_count`.

- `tenant` and `domain`: the first 32 have a label of their own, all others are `other`. `(none)`: a call of nobody
  that is known.
- All series of a tenant begin at 0 when it first calls, those of known codes and causes with them.
- `cause`: what an answer waited for or did, as in `coppice why`.
- `coppice_requests_*` count answers. `coppice_calls_*` count calls, of which one may have several answers: those that
  leave [a record](OPERATING.md#requests-and-what-they-used), and connections that were turned away.
- `vllm:*` have the names and meanings that vLLM gives them, `gen_ai_*` those of OpenTelemetry's GenAI conventions, so
  that boards, autoscalers and gateways that know these work. The other names pass `promtool check metrics`.
- While spans are sent, `vllm:time_to_first_token_seconds`, `vllm:e2e_request_latency_seconds` and
  `vllm:request_queue_time_seconds` have exemplars: each bucket names the trace of the newest traced request in it, with
  times that begin with its first byte. They are in the OpenMetrics form, which Prometheus asks for; it keeps them with
  `--enable-feature=exemplar-storage`.
"""


class Entry(NamedTuple):
    """A metric as it is exposed."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query may ask for."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def main(arguments: list[str]) -> str | None:
    """What is wrong; None where nothing is."""
    parser = argparse.ArgumentParser(prog="python -m scripts.metrics_reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    only_checks = parser.parse_args(arguments).check
    new = written()
    if only_checks:
        is_same = DOCUMENT.exists() and DOCUMENT.read_text() == new
        return None if is_same else f"{DOCUMENT.name} differs from the code: run make metrics-reference"
    DOCUMENT.write_text(new)
    return None


def written() -> str:
    """The document as the code has it."""
    parts = [_HEAD]
    for service, entries in reference().items():
        parts.append(f"\n## {service}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
        for entry in entries:
            labels = ", ".join(f"`{label}`" for label in entry.labels)
            parts.append(f"| `{entry.name}` | {entry.kind} | {labels} | {entry.text.replace('|', '/')} |\n")
    return "".join(parts)


def reference() -> dict[str, list[Entry]]:
    """Metrics by service, each list in order of names."""
    return {service: sorted(_entries(registry)) for service, registry in registries().items()}


def series_names() -> set[str]:
    """All names that a query may ask for."""
    return {name for entries in reference().values() for entry in entries for name in entry.series}


def exposition(registry: CollectorRegistry) -> str:
    """As it is scraped."""
    return generate_latest(registry).decode()


def _entries(registry: CollectorRegistry) -> Iterator[Entry]:
    # The registry has no public way to those labels of which no series exists yet.
    collectors: Iterable[Any] = registry._collector_to_names
    for collector in collectors:
        families = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for family in families:
            kind = getattr(family, "_type", None) or family.type
            name = getattr(family, "_name", None) or family.name
            text = getattr(family, "_documentation", None) or family.documentation
            name += "_total" if kind == "counter" else ""
            yield Entry(name, kind, tuple(getattr(family, "_labelnames", ())), text)


# ---- what each service registers, with nothing behind it


def registries() -> Mapping[str, CollectorRegistry]:
    watch = TenantsWatch(_EXAMPLE_TENANTS)
    scheduler = _registry("scheduler", PlannerCollector(lambda: NO_STATS, _MODEL), watch, TenantsAgreement(None, str))
    FrontDoorMetrics(scheduler, _MODEL).moved("example")
    CallMetrics(scheduler, _MODEL, ("POST /v1/chat/completions",))
    cache = _registry("cache", _cache_metrics(), RecoveryMetrics(_NoRecovery()), watch)  # type: ignore[arg-type]
    worker = _registry("worker", DiskMetrics(None))
    WorkerMetrics(worker, "worker-0")
    canary = _registry("canary")
    AuditMetrics(canary)
    return {
        "Scheduler": scheduler,
        "Cache": cache,
        "Worker": worker,
        "Isolation audit (`coppice audit isolation --watch`)": canary,
        "Advisory index (`coppice index`)": _registry("index", IngestMetrics(_NoIngest())),  # type: ignore[arg-type]
    }


def _registry(service: str, *collectors: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (BuildInfo(service), *collectors):
        registry.register(collector)
    return registry


def _cache_metrics() -> CacheMetrics:
    settings = CoreSettings(seal_key=bytes(16), default_domain=DomainConfig(domain=DomainId("default")))
    core = IndexCore(settings, CacheEpoch(1), 0)
    auditor = Auditor(None)  # type: ignore[arg-type]  # it is asked for no audit
    return CacheMetrics(
        core.stats,
        bool,
        int,
        auditor,
        lambda: dict.fromkeys(("session", "registration", "redis"), 0),
        lambda: core.statement(0),
    )


class _NoRecovery:
    def replay_counts(self) -> ReplayCounts:
        return ReplayCounts()

    def status(self) -> LogStatus:
        return LogStatus("", 0, 0.0, 0)


@dataclass(frozen=True)
class _NoIngest:
    num_nodes: int = 0

    def sources(self) -> list[Any]:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
