"""Three services over mutual TLS with certificates of `coppice certs`, clients over TLS: they serve, and nobody else
comes in."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from coppice.edge.wire import introduction, packed
from coppice_cli.app import app
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc
from tests.e2e.stack import Stack
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S, wait_for


def issue(folder: Path, role: str, name: str) -> list[str]:
    """Flags of one service."""
    found = CliRunner().invoke(app, ["certs", "issue", role, name, "--dir", str(folder)])
    assert found.exit_code == 0, found.output
    words = found.stdout.split()
    return [f"{flag}={path}" for flag, path in zip(words[::2], words[1::2], strict=True)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert CliRunner().invoke(app, ["certs", "init", "--dir", str(folder)]).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Of what clients see. It issues nothing that opens a door inside."""
    return Authority(tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="module")
def stack(
    checkpoint: Path, certificates: Path, public: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    certificate, key = public.public("127.0.0.1")
    ssl_args = [f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", "--front-doors=2"]
    with Stack(
        checkpoint,
        tmp_path_factory.mktemp("tls"),
        cache_args=issue(certificates, "cache", "cache-0"),
        worker_args=issue(certificates, "worker", "worker-0"),
        scheduler_args=[*issue(certificates, "scheduler", "scheduler-0"), *ssl_args],
        public_ca=public.folder / "ca.pem",
    ) as running:
        yield running


def test_a_completion_over_tls_from_end_to_end(stack: Stack) -> None:
    answer = stack.complete(list(range(1, 40)), 8)
    assert len(answer["choices"][0]["token_ids"]) == 8


def test_the_same_over_grpc(stack: Stack, public: Authority) -> None:
    credentials = grpc.ssl_channel_credentials((public.folder / "ca.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{stack.grpc_port}", credentials) as channel:
        tokens = pb.TokenIds(tokens=struct.pack("<39I", *range(1, 40)))
        request = pb.GenerateRequest(model="tiny", token_ids=tokens, max_tokens=8)
        answers = list(scheduler_pb2_grpc.GenerationStub(channel).Generate(request, timeout=WAIT_S))
    assert answers


@pytest.mark.wide
def test_renewed_public_certificates_are_shown_by_all_front_doors(stack: Stack, public: Authority) -> None:
    certificate, _ = public.public("127.0.0.1")
    renewed = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    for port in (stack.port, stack.grpc_port):
        shown = {ssl.get_server_certificate(("127.0.0.1", port)) for _ in range(12)}  # by either front door
        assert {ssl.PEM_cert_to_DER_cert(one) for one in shown} == {renewed}


ALERT = b"\x15\x03"  # how a record of TLS begins that says what is wrong
REQUESTS = (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", packed(introduction("index", "steps")))


def heard(connection: socket.socket, request: bytes = REQUESTS[0]) -> bytes:
    """What is answered to a few bytes, until the end."""
    found = b""
    try:
        connection.sendall(request)
        while part := connection.recv(1 << 16):
            found += part
    except OSError:
        pass
    return found


def test_all_ports_inside_speak_tls_alone(stack: Stack, certificates: Path) -> None:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.check_hostname = False
    ports = (
        stack.cache_sessions,
        stack.worker_sessions[0],
        stack.cache_http,
        stack.worker_http[0],
        stack.cache_grpc,
        stack.cache_admin,
    )
    for port in ports:
        context.set_alpn_protocols(["h2"] if port in (stack.cache_grpc, stack.cache_admin) else [])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain, context.wrap_socket(plain) as tls:
            assert tls.version() == "TLSv1.3"
            assert heard(tls) == b"", "it wants a certificate of us"
        for request in REQUESTS:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
                assert heard(plain, request)[:2] in (b"", ALERT), "without TLS it would answer one of them"


def test_health_of_a_public_api_needs_no_name_on_loopback(stack: Stack) -> None:
    assert CliRunner().invoke(app, ["health", f"https://127.0.0.1:{stack.port}"]).exit_code == 0
    assert CliRunner().invoke(app, ["health", f"http://127.0.0.1:{stack.port}"]).exit_code == 1


def test_health_commands_take_the_certificate_of_a_service(stack: Stack, certificates: Path) -> None:
    ca = ("--tls-ca", str(certificates / "ca.pem"))
    stem = certificates / "worker-worker-0"
    files = ("--tls-cert", f"{stem}.pem", "--tls-key", f"{stem}-key.pem", *ca)
    for port in (stack.cache_grpc, stack.cache_admin, stack.worker_grpc[0]):
        assert CliRunner().invoke(app, ["health", f"127.0.0.1:{port}", *files]).exit_code == 0
        assert CliRunner().invoke(app, ["health", f"127.0.0.1:{port}"]).exit_code == 1


@pytest.mark.wide
def test_it_goes_on_under_certificates_that_were_issued_again(stack: Stack, certificates: Path) -> None:
    for role, name in (("cache", "cache-0"), ("worker", "worker-0"), ("scheduler", "scheduler-0")):
        for path in (certificates / f"{role}-{name}.pem", certificates / f"{role}-{name}-key.pem"):
            path.unlink()
        issue(certificates, role, name)
    stack.services["worker-0"].kill()
    stack.services["worker-0"].start()
    wait_for(lambda: stack.get(f"{stack.url}/readyz")[0] == 200, "the worker to be back")
    assert len(stack.complete(list(range(50, 90)), 4)["choices"][0]["token_ids"]) == 4
