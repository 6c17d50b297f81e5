"""Every call over REST and gRPC, counted once by what its record says: refusals at the door, too.

    record of a call --> CountedLog --> CallMetrics: coppice_calls_total, coppice_calls_failed_total,
                              |                       gen_ai_server_* of the GenAI semantic conventions
                              '-------> the log
    what is no HTTP request, or one connection too many --> CallMetrics.turned_away

Of labels that clients could make up, paths and methods, only those that there are have one of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from coppice.request_log.record import RequestRecord
from coppice_rpc.v1 import scheduler_pb2
from coppice_scheduler.edge.base.errors import ErrorKind
from coppice_scheduler.edge.base.metrics import FAILURE_CODES, OTHER, TTFT_S, CappedLabels
from coppice_scheduler.edge.request_log.open_record import Log

NO_TENANT = "(none)"  # is the id of none
GRPC_APIS = tuple(f"gRPC {method.name}" for method in scheduler_pb2.DESCRIPTOR.services_by_name["Generation"].methods)
_CODE_LABELS = 128
_STRANGERS_CODES = ("invalid_api_key", "not_found", "method_not_allowed", "too_many_connections", "invalid_http")
_PROVIDER = "coppice"
_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}  # by what the answer's id begins with
# As the conventions have them.
_GEN_AI_TTFT_S = tuple(bound for bound in TTFT_S if bound <= 10)
_GEN_AI_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_GEN_AI_WHOLE_S = tuple(0.01 * 2**power for power in range(14))


class ApiLabels:
    """The api of a record to the route's: `POST /v1/requests/job-7/abort` to `.../{request_id}/abort`."""

    def __init__(self, apis: Iterable[str]) -> None:
        """`apis`: methods and routes; parts of a path that vary are in braces."""
        self.all = tuple(apis)
        self._fixed = frozenset(api for api in self.all if "{" not in api)
        self._varying = [
            (re.compile(re.sub(r"\\{[^}]*\\}", ".+", re.escape(api)), re.DOTALL), api) for api in self.all if "{" in api
        ]

    def label(self, api: str) -> str:
        if api in self._fixed:
            return api
        return next((route for pattern, route in self._varying if pattern.fullmatch(api)), OTHER)


class CallMetrics:
    """Register once per registry."""

    def __init__(
        self, registry: CollectorRegistry, model: str, apis: Iterable[str], labels: CappedLabels | None = None
    ) -> None:
        self._apis = ApiLabels(apis)
        self._labels = labels or CappedLabels()
        self._codes = CappedLabels(_CODE_LABELS, (*FAILURE_CODES, *_STRANGERS_CODES))
        self._tenants: set[str] = set()  # those that have begun
        self._calls = Counter("coppice_calls", "Calls by route and HTTP status.", ["api", "status"], registry=registry)
        self._failed = Counter(
            "coppice_calls_failed",
            "Calls that were refused, failed or cancelled, by tenant and error code; (none): nobody known.",
            ["tenant", "code"],
            registry=registry,
        )
        self._gen_ai = _GenAi(registry, model)
        for api in self._apis.all:
            self._calls.labels(api, "200")
        for code in _STRANGERS_CODES:
            self._failed.labels(NO_TENANT, code)

    def ended(self, record: RequestRecord) -> None:
        """A call ended as its record says."""
        self._calls.labels(self._apis.label(record.api), str(record.status)).inc()
        tenant = self._labels.label(record.tenant) if record.tenant else NO_TENANT
        if tenant != NO_TENANT and tenant not in self._tenants:
            self._tenants.add(tenant)
            for code in FAILURE_CODES:
                self._failed.labels(tenant, code)
        code = self._codes.label(record.end) if record.status >= 400 else ""
        if code:
            self._failed.labels(tenant, code).inc()
        if record.call:
            self._gen_ai.ended(record, code)

    def turned_away(self, kind: ErrorKind, code: str) -> None:
        """A connection that was answered before it had said a request."""
        self._calls.labels(OTHER, str(kind.http_status)).inc()
        self._failed.labels(NO_TENANT, self._codes.label(code)).inc()


class _GenAi:
    """The server's metrics of the GenAI semantic conventions, as OpenTelemetry names them in Prometheus."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        names = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model"]
        self._whole = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a call's arrival to its end; error_type is empty where it ended well.",
            [*names, "error_type"],
            buckets=_GEN_AI_WHOLE_S,
            registry=registry,
        )
        ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a call's arrival to its first token, of those that ended well.",
            names,
            buckets=_GEN_AI_TTFT_S,
            registry=registry,
        )
        per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between tokens of calls that ended well and have one answer.",
            names,
            buckets=_GEN_AI_PER_TOKEN_S,
            registry=registry,
        )
        self._names = {prefix: (name, _PROVIDER, model, model) for prefix, name in _OPERATIONS.items()}
        self._well = {prefix: self._whole.labels(*of, "") for prefix, of in self._names.items()}
        self._ttft = {prefix: ttft.labels(*of) for prefix, of in self._names.items()}
        self._per_token = {prefix: per_token.labels(*of) for prefix, of in self._names.items()}

    def ended(self, record: RequestRecord, code: str) -> None:
        """`code`: of the error, empty where there was none."""
        prefix, whole_s = record.call.partition("-")[0], record.total_ms / 1e3
        if prefix not in self._names:
            return
        if code:
            self._whole.labels(*self._names[prefix], code).observe(whole_s)
            return
        self._well[prefix].observe(whole_s)
        if record.ttft_ms:
            self._ttft[prefix].observe(record.ttft_ms / 1e3)
            if record.num_answers == 1 and record.tokens_out > 1:
                self._per_token[prefix].observe((record.total_ms - record.ttft_ms) / 1e3 / (record.tokens_out - 1))


class CountedLog:
    """Counts a record, and hands it on."""

    def __init__(self, log: Log, metrics: CallMetrics) -> None:
        self._log = log
        self._metrics = metrics

    def write(self, record: RequestRecord) -> None:
        """Never raises."""
        self._metrics.ended(record)
        self._log.write(record)
