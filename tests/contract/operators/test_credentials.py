"""Who may call what without a credential: every route and every method of every service is walked.

What answers to anybody stands here with its reason; whatever else there is, or is added, has to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from coppice.addresses import is_loopback
from coppice.settings import Settings
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_cache.edge.api.admin_http import build_app
from coppice_cache.edge.settings import CacheSettings
from coppice_cache.engine_index.http import build_ingest_app
from coppice_cache.engine_index.ingest import Ingest
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.rest_app import create_app
from coppice_worker.edge.settings import WorkerSettings
from tests.contract.worker.test_worker_service import Stack
from tests.fakes.api import grpc_served, rest
from tests.fakes.api.surface import CALL_S, call, methods, path_of, routes, services
from tests.fakes.cache.cache_ends import Cache

Keep = Callable[[Any], Any]
PROBE = "a load balancer or a supervisor asks it, and it tells nothing of a tenant"
CONTRACT = "it describes the API, which is public"
NO_TENANTS = "it is there only where no tenants file is, and then there is one tenant without a key"
INTERNAL = "the port is internal: without certificates whoever reaches it operates the service (SECURITY.md)"

OPEN_ROUTES: dict[str, dict[str, str]] = {
    "scheduler": {
        "/healthz": PROBE,
        "/readyz": PROBE,
        "/health": PROBE,
        "/openapi.json": CONTRACT,
        "/metrics": NO_TENANTS,
    },
    "cache": {
        "/healthz": PROBE,
        "/readyz": PROBE,
        "/openapi.json": CONTRACT,
        "/": INTERNAL,
        "/console/config.json": INTERNAL,
        "/console/a": INTERNAL,
        "/metrics": INTERNAL,
        "/v1/stats": INTERNAL,
        "/v1/statements": INTERNAL,
        "/v1/blocks": INTERNAL,
        "/v1/domains/a/tree": INTERNAL,
        "/v1/explain": INTERNAL,
        "/v1/audit": INTERNAL,
        "/v1/invalidate": INTERNAL,
        "/v1/pins": INTERNAL,
        "/v1/pins/a": INTERNAL,
    },
    "index": {
        "/healthz": PROBE,
        "/readyz": PROBE,
        "/openapi.json": CONTRACT,
        "/": INTERNAL,
        "/metrics": INTERNAL,
        "/v1/match": INTERNAL,
        "/v1/sources": INTERNAL,
    },
}
OPEN_METHODS: dict[str, tuple[str, set[str]]] = {
    "PrefixIndex": (
        INTERNAL,
        {
            *("OpenSession", "RenewSession", "CloseSession", "ListWorkers", "Match", "MatchBatch", "Stats"),
            *("Acquire", "Extend", "Publish", "Release", "Retain"),
        },
    ),
    "PrefixIndexAdmin": (
        INTERNAL,
        {"DumpTree", "Explain", "Audit", "Invalidate", "Pin", "Unpin", "ListPins", "Watch"},
    ),
    "Worker": (INTERNAL, {"Drain", "Undrain", "Stats"}),
}
# Of gRPC itself, on every server.
OPEN_SERVICES = {"grpc.health.v1.Health": PROBE, "grpc.reflection.v1alpha.ServerReflection": CONTRACT}
NO_CREDENTIALS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer nobody"},
    {"authorization": "Basic bm9ib2R5Om5vYm9keQ=="},
    {"authorization": digest_of_key("key")},
]


def directory() -> TenantDirectory:
    return TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key"),))])


# ---- REST


def test_every_route_of_the_scheduler_asks_for_a_key() -> None:
    with rest.serving(directory()) as served:
        app = create_app(served.frontdoor, served.registry)
        walked = routes(app)
        assert {path for _, path in walked} >= {"/v1/completions", "/v1/models/a", *OPEN_ROUTES["scheduler"]}
        for method, path in walked:
            is_open = path in OPEN_ROUTES["scheduler"]
            for headers in NO_CREDENTIALS:
                for body in (None, b"{", b'{"model": "org/demo", "prompt": "x"}'):
                    said = served.http.request(method, path, headers=headers, content=body)
                    assert (said.status_code == 401) != is_open, (method, path, headers, said.status_code)
        assert served.engine.requests == []
        assert served.http.get("/v1/models", headers={"authorization": "Bearer key"}).status_code == 200


def test_with_a_tenants_file_there_are_no_metrics_on_the_public_port() -> None:
    with rest.serving(directory()) as served:
        assert "/metrics" not in {path for _, path in routes(create_app(served.frontdoor, None))}


def cache_app(keep: Keep) -> Any:
    process = keep(Cache(audit_interval_s=0)).process
    return build_app(process._service, CollectorRegistry(), process._readiness)


def index_app(keep: Keep) -> Any:
    return build_ingest_app(keep(Ingest([])))


@pytest.mark.parametrize(("name", "build"), [("cache", cache_app), ("index", index_app)])
def test_every_internal_route_is_known(keep: Keep, name: str, build: Callable[[Keep], Any]) -> None:
    """A new one stands in the list above before it is served."""
    assert {path for _, path in routes(build(keep))} == set(OPEN_ROUTES[name])


# ---- gRPC


def test_every_method_of_generation_asks_for_a_key() -> None:
    async def test(served: grpc_served.Served) -> None:
        for method in methods("Generation"):
            request_type = message_factory.GetMessageClass(method.input_type)
            asked = served.channel.unary_stream(path_of(method), request_type.SerializeToString, None)
            for headers in NO_CREDENTIALS:
                stream = asked(request_type(), timeout=CALL_S, metadata=tuple(headers.items()))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stream.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (path_of(method), headers)
        assert served.engine.requests == []
        listed = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=CALL_S
        )
        answers = [answer async for answer in listed]
        assert services_listed(answers) == {"coppice_rpc.v1.Generation", *OPEN_SERVICES}
        health = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert health.status != health_pb2.HealthCheckResponse.UNKNOWN

    grpc_served.serve(test, directory())


def test_every_method_is_of_a_service_that_is_walked() -> None:
    assert {service.name for service in services()} == {"Generation", *OPEN_METHODS}
    for name, (_, known) in OPEN_METHODS.items():
        assert {method.name for method in methods(name)} == known


def test_servers_have_the_services_that_are_walked_and_no_others(keep: Keep) -> None:
    cache = keep(Cache(audit_interval_s=0))
    worker = keep(Stack())
    for address, names in (
        (f"127.0.0.1:{cache.port}", ("PrefixIndex",)),
        (f"127.0.0.1:{cache.admin_port}", ("PrefixIndexAdmin",)),
        (worker.grpc_address, ("Worker",)),
    ):
        with grpc.insecure_channel(address) as channel:
            listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=CALL_S
            )
            assert services_listed(listed) == {*(f"coppice_rpc.v1.{name}" for name in names), *OPEN_SERVICES}
            for method in methods():
                is_here = method.containing_service.name in names
                assert (call(channel, method) is not grpc.StatusCode.UNIMPLEMENTED) == is_here, path_of(method)


def services_listed(answers: Any) -> set[str]:
    return {service.name for answer in answers for service in answer.list_services_response.service}


# ---- what is open is not in everybody's reach


@pytest.mark.parametrize("settings", [CacheSettings, WorkerSettings, ServiceSettings])
def test_by_default_a_service_listens_on_this_machine_only(settings: type[Settings]) -> None:
    hosts = [field.default for name, field in settings.model_fields.items() if name == "host" or name.endswith("_host")]
    assert "127.0.0.1" in hosts
    assert all(is_loopback(host) for host in hosts if host is not None), "None: that of --host"
