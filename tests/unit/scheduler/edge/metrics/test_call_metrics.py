"""What of a record becomes a metric, under labels that no client can make up."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from coppice.request_log.record import RequestRecord
from coppice_scheduler.edge.base.errors import ErrorKind
from coppice_scheduler.edge.base.metrics import FAILURE_CODES, MAX_TENANT_LABELS, OTHER
from coppice_scheduler.edge.request_log.call_metrics import GRPC_APIS, NO_TENANT, ApiLabels, CallMetrics

CHATS, ABORT, MODEL_OF = (
    "POST /v1/chat/completions",
    "POST /v1/requests/{request_id}/abort",
    "GET /v1/models/{model_id}",
)
APIS = (CHATS, ABORT, MODEL_OF, *GRPC_APIS)
GEN_AI = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "coppice",
    "gen_ai_request_model": "demo",
    "gen_ai_response_model": "demo",
}


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = CallMetrics(self.registry, "demo", APIS)

    def ended(self, status: int = 200, end: str = "stop", api: str = CHATS, **fields: object) -> None:
        record = RequestRecord(at="", id="r", api=api, status=status, end=end, **fields)  # type: ignore[arg-type]
        self.metrics.ended(record)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def labels(self, name: str, label: str) -> set[str]:
        samples = [sample for family in self.registry.collect() for sample in family.samples if sample.name == name]
        return {sample.labels[label] for sample in samples}


@pytest.mark.parametrize(
    ("api", "label"),
    [
        (CHATS, CHATS),
        ("POST /v1/requests/job-7/abort", ABORT),
        ("POST /v1/requests/a/b\nc/abort", ABORT),
        ("GET /v1/models/org/demo", MODEL_OF),
        ("gRPC Generate", "gRPC Generate"),
        ("GET /v1/chat/completions", OTHER),  # another method
        ("BREW /v1/chat/completions", OTHER),
        ("POST /v1/chat/completions/", OTHER),
        ("GET /wp-login.php", OTHER),
        ("GET /v1/models", OTHER),  # not among the routes here
        ("", OTHER),
    ],
)
def test_paths_have_the_label_of_their_route(api: str, label: str) -> None:
    assert ApiLabels(APIS).label(api) == label


def test_all_methods_of_grpc_are_known() -> None:
    assert set(GRPC_APIS) == {f"gRPC {name}" for name in ("Generate", "ListModels", "Tokenize", "Detokenize", "Abort")}


def test_calls_are_counted_by_route_and_status_and_failures_by_tenant_and_code() -> None:
    world = World()
    world.ended(tenant="a")
    world.ended(429, "tenant_rate", tenant="a")
    world.ended(401, "invalid_api_key")
    world.ended(404, "not_found", api="GET /wp-login.php")
    world.ended(499, "cancelled", api="gRPC Generate", tenant="a")
    calls, failed = "coppice_calls_total", "coppice_calls_failed_total"
    assert world.value(calls, api=CHATS, status="200") == 1
    assert world.value(calls, api=CHATS, status="429") == 1
    assert world.value(calls, api=CHATS, status="401") == 1
    assert world.value(calls, api=OTHER, status="404") == 1
    assert world.value(calls, api="gRPC Generate", status="499") == 1
    assert world.value(failed, tenant="a", code="tenant_rate") == 1
    assert world.value(failed, tenant="a", code="cancelled") == 1
    assert world.value(failed, tenant=NO_TENANT, code="invalid_api_key") == 1
    assert world.value(failed, tenant=NO_TENANT, code="not_found") == 1


def test_series_begin_at_zero() -> None:
    """A counter that begins at 1 never rises, for an alert that looks at its increase."""
    world = World()
    for api in APIS:
        assert world.value("coppice_calls_total", api=api, status="200") == 0
    assert world.value("coppice_calls_failed_total", tenant=NO_TENANT, code="invalid_api_key") == 0
    assert world.value("coppice_calls_failed_total", tenant="a", code="queue_full") is None
    world.ended(tenant="a")
    for code in FAILURE_CODES:
        assert world.value("coppice_calls_failed_total", tenant="a", code=code) == 0
    assert world.value("gen_ai_server_request_duration_seconds_count", error_type="", **GEN_AI) == 0


def test_labels_are_bounded() -> None:
    world = World()
    for number in range(400):
        world.ended(400, f"code-{number}", api=f"GET /{number}", tenant=f"t{number}", call=f"chatcmpl-{number}")
    assert len(world.labels("coppice_calls_failed_total", "tenant")) == MAX_TENANT_LABELS + 2
    assert {OTHER, NO_TENANT} <= world.labels("coppice_calls_failed_total", "tenant")
    assert len(world.labels("coppice_calls_failed_total", "code")) <= 130
    assert world.labels("coppice_calls_total", "api") == {*APIS, OTHER}
    assert len(world.labels("gen_ai_server_request_duration_seconds_count", "error_type")) <= 130


def test_a_connection_that_is_turned_away_counts_as_a_call_of_nobody() -> None:
    world = World()
    world.metrics.turned_away(ErrorKind.UNAVAILABLE, "too_many_connections")
    assert world.value("coppice_calls_total", api=OTHER, status="503") == 1
    assert world.value("coppice_calls_failed_total", tenant=NO_TENANT, code="too_many_connections") == 1


def test_the_conventions_of_gen_ai() -> None:
    world = World()
    of_call = {"call": "chatcmpl-1", "tenant": "a", "ttft_ms": 500.0, "total_ms": 2500.0}
    world.ended(**of_call, num_answers=1, tokens_out=5)
    world.ended(**of_call, num_answers=2, tokens_out=9)  # nobody knows how long each of them took for a token
    world.ended(503, "worker_lost", call="chatcmpl-2", total_ms=1000.0)
    world.ended(call="cmpl-3", total_ms=10.0)
    world.ended(api=MODEL_OF)  # no call of a model
    whole = "gen_ai_server_request_duration_seconds"
    assert world.value(f"{whole}_count", error_type="", **GEN_AI) == 2
    assert world.value(f"{whole}_sum", error_type="", **GEN_AI) == 5
    assert world.value(f"{whole}_sum", error_type="worker_lost", **GEN_AI) == 1
    assert world.value("gen_ai_server_time_to_first_token_seconds_sum", **GEN_AI) == 1
    assert world.value("gen_ai_server_time_per_output_token_seconds_count", **GEN_AI) == 1
    assert world.value("gen_ai_server_time_per_output_token_seconds_sum", **GEN_AI) == 0.5
    completions = {**GEN_AI, "gen_ai_operation_name": "text_completion"}
    assert world.value(f"{whole}_count", error_type="", **completions) == 1
    assert world.value("gen_ai_server_time_to_first_token_seconds_count", **completions) == 0
