"""The cache service over TLS: every RPC and route asks for a role, and certificates change while it runs."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from coppice.addresses import Address
from coppice.edge.grpc_tls import open_channel
from coppice.edge.signal_event import SignalEvent
from coppice.errors import UnavailableError, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice.tls.rights import REST_OF_ALL, RPCS
from coppice_cache.edge.api.admin_http import HANDSHAKES_MAX, AdminServer
from coppice_cache.edge.process import CacheProcess
from coppice_cache.edge.settings import CacheSettings
from coppice_cli.app import app
from coppice_rpc.v1 import cache_admin_pb2, cache_pb2
from coppice_up.probe import GrpcServing
from tests.fakes.cache.cache_ends import Cache, FakeWorker
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for module in (cache_pb2, cache_admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cache(authority: Authority) -> Iterator[Cache]:
    files = authority.files("cache", "c0")
    started = Cache(tls_cert=str(files.certificate), tls_key=str(files.key), tls_ca=str(files.ca))
    yield started
    started.stop()


def code_of(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """Of a call that says nothing: what an allowed one says is not of interest."""
    call = channel.unary_stream(method, request_serializer=bytes, response_deserializer=bytes)(b"", timeout=WAIT_S)
    try:
        next(call)
    except grpc.RpcError as error:
        return error.code()
    except StopIteration:
        pass
    finally:
        call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", Role)
def test_every_rpc_is_refused_to_the_wrong_role(cache: Cache, authority: Authority, role: Role) -> None:
    tls = authority.credentials(role, "x")
    for method in METHODS:
        with open_channel(address_of(cache, method), tls, server=Role.CACHE) as channel:
            if role not in RPCS[method]:
                assert code_of(channel, method) is grpc.StatusCode.PERMISSION_DENIED, method


def test_the_right_role_is_answered(cache: Cache, authority: Authority) -> None:
    for role, method in ((Role.SCHEDULER, "PrefixIndex/Stats"), (Role.OPERATOR, "PrefixIndexAdmin/ListPins")):
        tls = authority.credentials(role, "x")
        with open_channel(address_of(cache, method), tls, server=Role.CACHE) as channel:
            assert code_of(channel, f"/coppice_rpc.v1.{method}") is grpc.StatusCode.OK


def address_of(cache: Cache, method: str) -> str:
    """Of the listener that has this method."""
    return f"127.0.0.1:{cache.admin_port if 'PrefixIndexAdmin' in method else cache.port}"


@pytest.mark.parametrize("role", Role)
def test_health_is_for_all_who_have_a_certificate(cache: Cache, authority: Authority, role: Role) -> None:
    for port in (cache.port, cache.admin_port):
        with open_channel(f"127.0.0.1:{port}", authority.credentials(role, "x")) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1


def test_without_a_certificate_of_the_ca_there_is_no_call(cache: Cache, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path).credentials("operator", "x")
    ca_alone = grpc.ssl_channel_credentials((authority.folder / "ca.pem").read_bytes())
    named = (("grpc.ssl_target_name_override", "cache.coppice.internal"),)
    address = f"127.0.0.1:{cache.port}"
    for channel in (
        grpc.insecure_channel(address),
        open_channel(address, stranger),
        grpc.secure_channel(address, ca_alone, options=named),
    ):
        with channel:
            assert code_of(channel, "/coppice_rpc.v1.PrefixIndex/Stats") is grpc.StatusCode.UNAVAILABLE


def test_a_server_of_another_role_is_not_spoken_to(cache: Cache, authority: Authority) -> None:
    with open_channel(f"127.0.0.1:{cache.port}", authority.credentials("operator", "x"), server=Role.WORKER) as channel:
        assert code_of(channel, "/coppice_rpc.v1.PrefixIndex/Stats") is grpc.StatusCode.UNAVAILABLE


# ---- REST ----


def asked(cache: Cache, context: ssl.SSLContext, path: str, method: str = "GET") -> tuple[int, bytes, Any]:
    """Status, body, certificate of the server."""
    connection = http.client.HTTPSConnection("127.0.0.1", cache.http_port, context=context, timeout=WAIT_S)
    try:
        connection.connect()
        certificate = connection.sock.getpeercert()  # type: ignore[attr-defined]
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), certificate
    finally:
        connection.close()


@pytest.mark.parametrize("role", Role)
def test_operators_have_the_rest_and_others_health_and_metrics(cache: Cache, authority: Authority, role: Role) -> None:
    context = authority.credentials(role, "x").client_context()
    _, schema, _ = asked(cache, authority.credentials("operator", "x").client_context(), "/openapi.json")
    routes = {(method.upper(), path) for path, item in json.loads(schema)["paths"].items() for method in item}
    assert len(routes) > 10
    for method, path in {*routes, ("GET", "/openapi.json"), ("GET", "/no/such")}:
        status = asked(cache, context, path, method)[0] if role is not Role.OPERATOR or method == "GET" else 200
        assert (status == 403) == (role is not Role.OPERATOR and path not in REST_OF_ALL), (method, path, status)


def test_rest_without_a_certificate_is_no_rest(cache: Cache, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.folder / "ca.pem")
    context.check_hostname = False
    with pytest.raises((ssl.SSLError, ConnectionError)):
        asked(cache, context, "/healthz")


def test_hundreds_of_silent_connections_are_few_handshakes_and_keep_no_operator_out(
    cache: Cache, authority: Authority
) -> None:
    context = authority.credentials("operator", "x").client_context()
    with ExitStack() as open_:
        for _ in range(HANDSHAKES_MAX + 200):
            open_.enter_context(socket.create_connection(("127.0.0.1", cache.http_port), timeout=WAIT_S))
        assert asked(cache, context, "/healthz")[0] == 200  # it was accepted behind all of them
        server = cache.process._http._server
        assert server is not None
        assert len(server.server_state.connections) <= HANDSHAKES_MAX + 1


def cache_command(url: str, files: list[str], *command: str) -> Any:
    found = CliRunner().invoke(app, ["cache", *files, *command, "--url", url])
    if found.exception is not None:
        raise found.exception
    return json.loads(found.stdout)


def test_the_command_line_speaks_to_it_as_an_operator(cache: Cache, authority: Authority) -> None:
    url, operator = f"https://127.0.0.1:{cache.http_port}", authority.flags("operator", "ann")
    assert "workers" in cache_command(url, operator, "stats", "--json")
    with pytest.raises(UsageError, match="is for coppice://worker/w0; this is coppice://operator"):
        cache_command(url, authority.flags("worker", "w0"), "stats", "--json")
    with pytest.raises(UsageError, match="do not go together"):
        cache_command(url, [], "stats", "--json")
    with pytest.raises(UsageError, match="do not go together"):
        cache_command(url.replace("https", "http"), operator, "stats", "--json")
    with pytest.raises(UsageError, match="belong together"):
        cache_command(url, operator[:1], "stats", "--json")


def test_the_command_line_tells_its_commands_to_a_cache_alone(authority: Authority) -> None:
    imposter = AdminServer("127.0.0.1", 0, tls=authority.credentials("worker", "w0"))
    imposter.start(lambda scope, receive, send: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnavailableError, match="coppice://worker/w0 answers there"):
        cache_command(f"https://127.0.0.1:{imposter.port}", authority.flags("operator", "ann"), "stats", "--json")
    imposter.stop()


def test_the_health_command_takes_certificates(cache: Cache, authority: Authority) -> None:
    flags = authority.flags("worker", "w0")
    assert CliRunner().invoke(app, ["health", f"127.0.0.1:{cache.port}", *flags]).exit_code == 0
    assert CliRunner().invoke(app, ["health", f"127.0.0.1:{cache.port}"]).exit_code == 1


# ---- sessions, settings, renewal ----


def test_a_worker_registers_over_tls(cache: Cache, authority: Authority, keep: Keep) -> None:
    worker = keep(FakeWorker(cache, "w7", tls=authority.credentials("worker", "w7")))
    worker.wait_registered()


def test_new_certificates_are_shown_without_a_restart(keep: Keep, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("cache", "c0")
    cache = keep(Cache(tls_cert=str(files.certificate), tls_key=str(files.key), tls_ca=str(files.ca)))
    operator = authority.credentials("operator", "x")
    before = asked(cache, operator.client_context(), "/healthz")[2]["serialNumber"]
    changed = Authority(tmp_path)  # another CA as well
    changed.files("cache", "c0")
    renewed_files = changed.files("operator", "x")
    renewed = Credentials(renewed_files)
    assert asked(cache, renewed.client_context(), "/healthz")[2]["serialNumber"] != before
    wait_for(GrpcServing(Address("127.0.0.1", cache.port), renewed_files), "gRPC under new certificates")


@pytest.mark.parametrize("flag", ["host", "http_host"])
def test_a_public_address_without_tls_is_refused(flag: str) -> None:
    name = f"--{flag.replace('_', '-')}"
    with pytest.raises(UsageError, match=rf"{name} 0\.0\.0\.0 can be reached from other machines"):
        CacheProcess(
            CacheSettings(**{flag: "0.0.0.0"}, grpc_port=0, admin_grpc_port=0, session_port=0, http_port=0),
            SignalEvent(),
        )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
def test_operators_have_an_address_of_their_own_where_one_is_given(keep: Keep) -> None:
    cache = keep(Cache(http_host="127.0.0.2"))
    with urllib.request.urlopen(f"http://127.0.0.2:{cache.http_port}/healthz", timeout=WAIT_S) as answer:
        assert answer.status == 200
    wait_for(GrpcServing(Address("127.0.0.2", cache.admin_port)), "gRPC of operators there, too")
    wait_for(GrpcServing(Address("127.0.0.1", cache.port)), "gRPC where the rest is")
