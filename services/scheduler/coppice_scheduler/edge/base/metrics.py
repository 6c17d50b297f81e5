"""Metrics of the front door, under the names that dashboards for vLLM already read, labelled by tenant.

The first 32 tenants that call have a label of their own, the rest is `other`: a label per tenant without a bound would
let tenants fill the memory of whoever scrapes.

Front doors are processes of their own. They count in files that are mapped into their memory (the multiprocess mode of
prometheus_client, which a variable in their environment switches on), and whoever is scraped sums them up. So what a
front door counted outlives it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MAX_TENANT_LABELS = 32
OTHER_TENANTS = "other"

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


def merged_registry(folder: str, collector: Collector) -> CollectorRegistry:
    """The sums of what all front doors counted in `folder`, and what `collector` has."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    registry.register(collector)
    return registry


class TenantLabels:
    """Tenant id to label value, capped."""

    def __init__(self, cap: int = MAX_TENANT_LABELS) -> None:
        self._cap = cap
        self._named: set[str] = set()

    def label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= self._cap:
                return OTHER_TENANTS
            self._named.add(tenant)
        return tenant


class FrontDoorMetrics:
    """Register once per registry."""

    def __init__(self, registry: CollectorRegistry, model: str, labels: TenantLabels | None = None) -> None:
        self._model = model
        self._labels = labels or TenantLabels()
        names = ("model_name", "tenant")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, buckets=buckets, registry=registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Time between tokens of a request.", _GAP_S)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE_S)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of served requests.", names, registry=registry)
        self._generated = Counter("vllm:generation_tokens", "Tokens generated.", names, registry=registry)
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended well, by reason.",
            (*names, "finished_reason"),
            registry=registry,
        )
        self._failed = Counter(
            "coppice:requests_failed",
            "Requests that were refused, failed or cancelled, by error code.",
            (*names, "code"),
            registry=registry,
        )
        self._replayed = Counter(
            "coppice:requests_replayed",
            "Calls that got the outcome of an earlier one with the same Idempotency-Key.",
            names,
            registry=registry,
        )

        self._moved = Counter(
            "coppice:requests_moved",
            "Times that a request went on at another planner, since its own was lost.",
            names,
            registry=registry,
        )

    def moved(self, tenant: str) -> None:
        self._moved.labels(self._model, self._labels.label(tenant)).inc()

    def replayed(self, tenant: str) -> None:
        self._replayed.labels(self._model, self._labels.label(tenant)).inc()

    def first_token(self, tenant: str, seconds: float, num_prompt_tokens: int) -> None:
        label = self._labels.label(tenant)
        self._ttft.labels(self._model, label).observe(seconds)
        self._prompt.labels(self._model, label).inc(num_prompt_tokens)

    def gap(self, tenant: str, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens came together `seconds` after the ones before."""
        if num_tokens:
            self._gap.labels(self._model, self._labels.label(tenant)).observe(seconds / num_tokens)

    def finished(self, tenant: str, seconds: float, reason: str, num_tokens: int) -> None:
        label = self._labels.label(tenant)
        self._whole.labels(self._model, label).observe(seconds)
        self._success.labels(self._model, label, reason).inc()
        self._generated.labels(self._model, label).inc(num_tokens)

    def failed(self, tenant: str, code: str, num_tokens: int) -> None:
        label = self._labels.label(tenant)
        self._failed.labels(self._model, label, code).inc()
        self._generated.labels(self._model, label).inc(num_tokens)
