"""The same bytes over TCP, TLS, a Unix socket and gRPC: how long an answer takes, and what it costs both processes.

    python -m coppice_bench.rpc.links FOLDER      the echoing process; prints one JSON line, ends with its input

Requests come back to back, and after pauses: whoever waited has to be woken. TCP, TLS over it and the Unix socket are
the transport of sessions (`coppice.edge.wire`), gRPC is a bidirectional stream. Every answer says how much processor
time the echoing process has had.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc

from coppice.edge.grpc_server import GrpcServer
from coppice.edge.wire import Wire, WireClosed
from coppice.tls.certificates import issue, make_ca
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Identity, Role
from coppice_bench.report import note
from coppice_bench.rpc.client import BareStream
from coppice_bench.rpc.processes import serving
from coppice_bench.rpc.wire import BARE_METHOD, BARE_SERVICE

PAUSES_MS = {0: 1_000, 1: 400, 10: 200, 100: 40}  # and how many requests follow each
QUICK_SHARE = 20
_TURN = 10  # requests over one link before the next
_REQUEST = bytes(2_144)  # as an Acquire of 512 tokens
_ANSWER_BYTES = 352
_CLOCK_BYTES = 8
_ANSWER_S = 10.0
_NS_PER_US = 1_000
_GRACE_S = 0.2

Ask = Callable[[bytes], bytes]


def measure_links(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each link and pause: µs until the answer (median, 95th percentile), µs of processor time of both
    processes for a round trip. Raises CoppiceError."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _certified(Path(folder)) as tls,
        serving("coppice_bench.rpc.links", folder) as ports,
        _Asking(socket.create_connection(("127.0.0.1", ports["tcp"]))) as tcp,
        _Asking(socket.create_connection(("127.0.0.1", ports["tls"])), tls) as sealed,
        _Asking(_unix(f"{folder}/echo")) as unix,
        BareStream(ports["grpc"]) as stream,
    ):
        links: dict[str, Ask] = {"tcp": tcp.ask, "tls": sealed.ask, "unix": unix.ask, "grpc": stream.answer}
        rows = []
        for pause_ms, count in PAUSES_MS.items():
            note(f"links, pauses of {pause_ms} ms")
            rows += _measure(links, pause_ms / 1_000, count // QUICK_SHARE if quick else count)
        return rows


def _measure(links: dict[str, Ask], pause_s: float, count: int) -> list[dict[str, Any]]:
    times: dict[str, list[int]] = {name: [] for name in links}
    spent = dict.fromkeys(links, 0)
    turn = min(_TURN, count)
    for _ in range(0, count, turn):
        for name, ask in links.items():
            began_ns = _clocks_ns(ask)
            for _ in range(turn):
                time.sleep(pause_s)
                asked_ns = time.perf_counter_ns()
                ask(_REQUEST)
                times[name].append(time.perf_counter_ns() - asked_ns)
            spent[name] += _clocks_ns(ask) - began_ns
    return [
        {
            "link": name,
            "pause_ms": pause_s * 1_000,
            "us": median(times[name]) / _NS_PER_US,
            "us_p95": quantiles(times[name], n=20)[-1] / _NS_PER_US,
            "cpu_us": spent[name] / (len(times[name]) + len(times[name]) / turn) / _NS_PER_US,
        }
        for name in links
    ]


def _clocks_ns(ask: Ask) -> int:
    """Processor time of both processes until now."""
    there_ns = int.from_bytes(ask(_REQUEST)[:_CLOCK_BYTES], "little")
    return there_ns + time.process_time_ns()


class _Asking:
    def __init__(self, connection: socket.socket, tls: Credentials | None = None) -> None:
        self._wire = Wire(connection)
        if tls is not None:
            self._wire.start_tls(tls.channel(is_server=False), _ANSWER_S)

    def ask(self, request: bytes) -> bytes:
        self._wire.write(request)
        return self._wire.next(_ANSWER_S)

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()


@contextlib.contextmanager
def _certified(folder: Path) -> Iterator[Credentials]:
    """Certificates of both processes in `folder`, and ours."""
    now, lifetime = datetime.now(UTC), timedelta(hours=1)
    ca = make_ca("bench", now, lifetime)
    (folder / "ca.pem").write_bytes(ca.certificate)
    for role in (Role.CACHE, Role.SCHEDULER):
        issued = issue(ca, Identity(role, "bench"), now, lifetime)
        (folder / f"{role}.pem").write_bytes(issued.certificate)
        (folder / f"{role}-key.pem").write_bytes(issued.key)
    yield _credentials(folder, Role.SCHEDULER)


def _credentials(folder: Path, role: Role) -> Credentials:
    return Credentials(TlsFiles(folder / f"{role}.pem", folder / f"{role}-key.pem", folder / "ca.pem"), role)


def _unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


# ---- the echoing process ----


def _answer() -> bytes:
    return time.process_time_ns().to_bytes(_CLOCK_BYTES, "little").ljust(_ANSWER_BYTES, b"\0")


def _echo(listener: socket.socket, tls: Credentials | None = None) -> None:
    wire = Wire(listener.accept()[0])
    try:
        if tls is not None:
            wire.start_tls(tls.channel(is_server=True), _ANSWER_S)
        while True:
            for _ in wire.receive(_ANSWER_S):
                wire.write(_answer())
    except WireClosed:
        wire.close()


def _stream(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
    for _ in requests:
        yield _answer()


def _add_stream(server: grpc.Server) -> None:
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE_SERVICE, {BARE_METHOD: handler}),))


def main() -> None:
    tcp, sealed = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    tls = _credentials(Path(sys.argv[1]), Role.CACHE)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"{sys.argv[1]}/echo")
    unix.listen()
    for arguments in ((tcp,), (sealed, tls), (unix,)):
        threading.Thread(target=_echo, args=arguments, daemon=True).start()
    server = GrpcServer("127.0.0.1:0", (), _add_stream, "bare")
    server.start()
    ports = {"tcp": tcp.getsockname()[1], "tls": sealed.getsockname()[1], "grpc": server.port}
    print(json.dumps(ports), flush=True)
    sys.stdin.read()
    server.stop(_GRACE_S)


if __name__ == "__main__":
    main()
