"""Metrics of the answers that a front door gives, under the names that dashboards for vLLM already read, by tenant.

The first 32 tenants that call have a label of their own, the rest is `other`: a label per tenant without a bound would
let tenants fill the memory of whoever scrapes. All series of a label begin at 0 when it is first made, so that a first
failure is a rise.

Front doors are processes of their own. They count in files that are mapped into their memory (the multiprocess mode of
prometheus_client, which a variable in their environment switches on), and whoever is scraped sums them up. So what a
front door counted outlives it. That mode keeps no exemplars; they are taken from the records of requests
(`edge/request_log/exemplars.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from coppice.request_log.causes import NS_PER_S
from coppice.request_log.phases import ns_by_kind, phases_of
from coppice.request_log.stages import Stage, StageKind
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode, Refused, RefusedReason
from coppice_scheduler.edge.base.errors import code_of, from_output, from_refused

MAX_TENANT_LABELS = 32
OTHER = "other"

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
_PHASE_S = (0.001, 0.005, 0.01, 0.025, 0.05, *_WHOLE_S)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

FINISH_REASONS = ("stop", "length", "tool_calls")
# What a request can be refused with or end with; other codes begin when they first occur.
FAILURE_CODES = tuple(
    sorted(
        {code_of(from_refused(Refused(reason, "", 0))) for reason in RefusedReason}
        | {code_of(from_output(OutputError(code, ""))) for code in OutputErrorCode}
        | {"cancelled", "not_ready"}
    )
)


def merged_registry(folder: str, collectors: Iterable[Collector]) -> CollectorRegistry:
    """The sums of what all front doors counted in `folder`, and what `collectors` have."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    for collector in collectors:
        registry.register(collector)
    return registry


class CappedLabels:
    """Id to label value: the first `cap` ids have their own."""

    def __init__(self, cap: int = MAX_TENANT_LABELS, known: Iterable[str] = ()) -> None:
        self._cap = cap
        self._named: set[str] = set(known)

    def label(self, name: str) -> str:
        if name not in self._named:
            if len(self._named) >= self._cap:
                return OTHER
            self._named.add(name)
        return name


class AnswerEnd(NamedTuple):
    """An answer that ended well."""

    whole_s: float  # from its arrival
    first_s: float  # to its first token; 0: that was not seen
    reason: str  # one of FINISH_REASONS
    num_prompt_tokens: int
    num_cached_tokens: int  # of its prompt; 0 for all but the first answer to it
    num_output_tokens: int
    stages: Sequence[Stage] = ()


class _Families:
    """What is registered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        names = ("model_name", "tenant")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*names, *more), registry=registry)

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "From an answer's arrival to its first token.", TTFT_S
        )
        self.gap = histogram("vllm:inter_token_latency_seconds", "Time between tokens of an answer.", _GAP_S)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of an answer.", _GAP_S
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "From an answer's arrival to its last token.", _WHOLE_S
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "From an answer's arrival to its first computation.", _PHASE_S
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From an answer's first computation to its first token.", _PHASE_S
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From an answer's first token to its last.", _PHASE_S
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode of an answer together.", _PHASE_S
        )
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Tokens of the prompt of an answer.", _TOKENS)
        self.output_size = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens of answers that began, found cached or computed.")
        self.cached = counter("vllm:prompt_tokens_cached", "Cached prompt tokens of answers that ended well.")
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Answers that ended well, by reason.", "finished_reason")
        self.failed = counter(
            "coppice_requests_failed", "Answers that were refused, failed or cancelled, by error code.", "code"
        )
        self.replayed = counter(
            "coppice_requests_replayed", "Calls that got the outcome of an earlier one with the same Idempotency-Key."
        )
        self.moved = counter(
            "coppice_requests_moved", "Times that a request went on at another planner, since its own was lost."
        )
        self.spent = counter(
            "coppice_request_time_seconds",
            "Time of answers by what they waited for, lost it to or did; failed ones too.",
            "cause",
        )


class _Series:
    """Of one label. Making them takes a lookup each, so they are made once."""

    def __init__(self, families: _Families, model: str, label: str) -> None:
        names = (model, label)
        self.ttft, self.gap = families.ttft.labels(*names), families.gap.labels(*names)
        self.per_token, self.whole = families.per_token.labels(*names), families.whole.labels(*names)
        self.queue, self.prefill = families.queue.labels(*names), families.prefill.labels(*names)
        self.decode, self.inference = families.decode.labels(*names), families.inference.labels(*names)
        self.prompt_size, self.output_size = families.prompt_size.labels(*names), families.output_size.labels(*names)
        self.prompt, self.cached = families.prompt.labels(*names), families.cached.labels(*names)
        self.generated = families.generated.labels(*names)
        self.replayed, self.moved = families.replayed.labels(*names), families.moved.labels(*names)
        self.success = {reason: families.success.labels(*names, reason) for reason in FINISH_REASONS}
        self.failed = {code: families.failed.labels(*names, code) for code in FAILURE_CODES}
        self.spent = {kind: families.spent.labels(*names, kind.value) for kind in StageKind}


class FrontDoorMetrics:
    """Register once per registry."""

    def __init__(self, registry: CollectorRegistry, model: str, labels: CappedLabels | None = None) -> None:
        self._model = model
        self._labels = labels or CappedLabels()
        self._families = _Families(registry)
        self._series: dict[str, _Series] = {}

    def _of(self, tenant: str) -> _Series:
        label = self._labels.label(tenant)
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = _Series(self._families, self._model, label)
        return series

    def moved(self, tenant: str) -> None:
        self._of(tenant).moved.inc()

    def replayed(self, tenant: str) -> None:
        self._of(tenant).replayed.inc()

    def first_token(self, tenant: str, seconds: float, num_prompt_tokens: int) -> None:
        series = self._of(tenant)
        series.ttft.observe(seconds)
        series.prompt.inc(num_prompt_tokens)

    def gap(self, tenant: str, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens came together `seconds` after the ones before."""
        if num_tokens:
            self._of(tenant).gap.observe(seconds / num_tokens)

    def lived(self, tenant: str, stages: Sequence[Stage]) -> None:
        """All stages of an answer, however it ended."""
        spent = self._of(tenant).spent
        for kind, length_ns in ns_by_kind(stages).items():
            if length_ns:
                spent[kind].inc(length_ns / NS_PER_S)

    def finished(self, tenant: str, end: AnswerEnd) -> None:
        series = self._of(tenant)
        series.whole.observe(end.whole_s)
        series.success[end.reason].inc()
        series.generated.inc(end.num_output_tokens)
        series.cached.inc(end.num_cached_tokens)
        series.prompt_size.observe(end.num_prompt_tokens)
        series.output_size.observe(end.num_output_tokens)
        if end.first_s and end.num_output_tokens > 1:
            series.per_token.observe((end.whole_s - end.first_s) / (end.num_output_tokens - 1))
        if end.stages:
            phases = phases_of(end.stages)
            series.queue.observe(phases.queue_ns / NS_PER_S)
            series.prefill.observe(phases.prefill_ns / NS_PER_S)
            series.decode.observe(phases.decode_ns / NS_PER_S)
            series.inference.observe(phases.inference_ns / NS_PER_S)

    def failed(self, tenant: str, code: str, num_tokens: int) -> None:
        series = self._of(tenant)
        known = series.failed.get(code)
        if known is None:
            known = self._families.failed.labels(self._model, self._labels.label(tenant), code)
        known.inc()
        series.generated.inc(num_tokens)
