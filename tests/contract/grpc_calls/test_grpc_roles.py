"""Roles at a gRPC server: whatever kind of call it is, the table decides; without TLS nobody is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice.edge import grpc_tls
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.grpc_tls import open_channel
from coppice.tls.identity import Role
from coppice.tls.rights import RPCS
from coppice_rpc.v1 import worker_pb2, worker_pb2_grpc
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
MAY_CALL = {
    "/coppice_rpc.v1.Worker/Drain": {Role.OPERATOR},
    "/coppice_rpc.v1.Worker/Undrain": {Role.OPERATOR},
    "/coppice_rpc.v1.Worker/Stats": {Role.OPERATOR},
}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def add_echoes(server: grpc.Server) -> None:
    """One method of each kind, which answers with what was said."""
    handlers = {}
    for kind in KINDS:
        make = getattr(grpc, f"{kind}_rpc_method_handler")

        def echo(said: Any, context: Any, kind: str = kind) -> Any:
            parts = list(said) if kind.startswith("stream") else [said]
            return iter(parts) if kind.endswith("stream") else b"".join(parts)

        handlers[kind] = make(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker_pb2_grpc.WorkerServicer(), server)


@pytest.fixture
def server(authority: Authority) -> Iterator[GrpcServer]:
    started = GrpcServer("127.0.0.1:0", (), add_echoes, "test", tls=authority.credentials("worker", "w0"))
    started.start()
    yield started
    started.stop(0)


def call(channel: grpc.Channel, kind: str) -> bytes:
    method = getattr(channel, kind)(f"/test.Echo/{kind}")
    said = iter([b"a", b"b"]) if kind.startswith("stream") else b"ab"
    answer = method(said, timeout=WAIT_S)
    return b"".join(answer) if kind.endswith("stream") else answer


def code(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(method)(b"", timeout=WAIT_S)
    assert isinstance(refused.value, grpc.Call)
    return refused.value.code()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_call_needs_a_role(
    server: GrpcServer, authority: Authority, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("coppice.tls.rights.RPCS", {**RPCS, f"/test.Echo/{kind}": frozenset({Role.OPERATOR})})
    address = f"127.0.0.1:{server.port}"
    with open_channel(address, authority.credentials("operator", "o"), server=Role.WORKER) as channel:
        assert call(channel, kind) == b"ab"
    with open_channel(address, authority.credentials("cache", "c"), server=Role.WORKER) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, kind)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "coppice://cache/c may not call /test.Echo" in (refused.value.details() or "")


def test_what_the_table_does_not_name_is_refused_to_all(server: GrpcServer, authority: Authority) -> None:
    assert grpc_tls.RPCS is RPCS
    for role in Role:
        with open_channel(f"127.0.0.1:{server.port}", authority.credentials(role, "x")) as channel:
            assert code(channel, "/test.Echo/unary_unary") is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("role", Role)
def test_every_rpc_of_a_worker_is_refused_to_the_wrong_role(
    server: GrpcServer, authority: Authority, role: Role
) -> None:
    services = worker_pb2.DESCRIPTOR.services_by_name.values()
    methods = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    assert set(methods) == set(MAY_CALL)
    with open_channel(f"127.0.0.1:{server.port}", authority.credentials(role, "x")) as channel:
        for method in methods:
            answer = grpc.StatusCode.UNIMPLEMENTED  # of the bare servicer
            expected = answer if role in MAY_CALL[method] else grpc.StatusCode.PERMISSION_DENIED
            assert code(channel, method) is expected, method


def test_without_tls_nobody_is_asked() -> None:
    plain = GrpcServer("127.0.0.1:0", (), add_echoes, "test")
    plain.start()
    with grpc.insecure_channel(f"127.0.0.1:{plain.port}") as channel:
        assert call(channel, "unary_unary") == b"ab"
    plain.stop(0)


def test_grpc_is_told_of_files_that_have_changed_and_of_nothing_else(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told at each connection it ends the process, after some ten thousand of them."""
    told: list[Any] = []
    configured = grpc.ssl_server_certificate_configuration

    def tells(*pairs: Any, **more: Any) -> Any:
        told.append(pairs)
        return configured(*pairs, **more)

    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", tells)
    server = GrpcServer("127.0.0.1:0", (), add_echoes, "test", tls=authority.credentials("worker", "w0"))
    server.start()

    def connects() -> None:
        with open_channel(f"127.0.0.1:{server.port}", authority.credentials("operator", "ann")) as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)

    for _ in range(5):
        connects()
    assert len(told) == 1
    authority.files("worker", "w0")
    for _ in range(5):
        connects()
    assert len(told) == 2
    server.stop(0)
