"""`/metrics`, `/healthz` and `/readyz` of a process that serves no other HTTP.

    connection made --10 s--> hands are shaken, the request is read, its answer is written; then it is closed
         +-- one too many, of one address or in all: closed at once

Each connection keeps a thread of a process that has better things to do with them.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from coppice.errors import UnavailableError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import NoIdentity, identity_of
from coppice.tls.rights import why_not_rest

POLL_S = 0.5  # how often the listening thread looks around by itself
PATIENCE_S = 10.0  # with a connection from its first moment to its last
CONNECTIONS_MAX = 32
_OPENMETRICS = "application/openmetrics-text"
PEER_CONNECTIONS_MAX = 8  # of one address, so that no machine keeps all others out


class Collected(Protocol):
    """What metrics are read from: a registry, or what adds to those of one."""

    def collect(self) -> Iterable[Metric]: ...


class Page(NamedTuple):
    """An answer to a GET."""

    status: int
    body: bytes
    content_type: str


Pages = Callable[[str, str], Page | None]  # of a path and a query; None: there is no such path


def _no_pages(path: str, query: str) -> Page | None:
    return None


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running `/metrics`, `/healthz`, `/readyz` server; `port` is the one that it really got."""

    host: str
    port: int
    _server: _Server
    _thread: threading.Thread

    def close(self) -> None:
        with suppress(OSError):  # wakes the thread
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    not_ready_because: Callable[[], Sequence[str]],
    *,
    notes: Callable[[], Sequence[str]] = tuple,
    exemplars: Collected | None = None,
    pages: Pages = _no_pages,
    origins: Sequence[str] = (),
    flag: str = "--http-port",
    tls: Credentials | None = None,
    patience_s: float = PATIENCE_S,
) -> MetricsServer:
    """Serve metrics of `registry` from threads of their own. Port 0 takes a free one; `flag` set it, for the message.

    `/healthz` answers 200 while the process lives; `/readyz` answers 503 with the reasons that `not_ready_because`
    gives, 200 when it gives none; `notes` are more lines for whoever reads it. Whoever asks for OpenMetrics, as
    Prometheus does, gets the metrics of `exemplars`. `pages` has what else there is; scripts of web pages of `origins`
    may read that, and nothing else. With `tls` all of it is for those alone who show a certificate of the stack, of any
    role, and `pages` for operators. No connection lasts longer than `patience_s`.
    Raises UnavailableError when the port cannot be had.
    """

    class Handler(_MetricsHandler):
        pass

    Handler.registry = registry
    Handler.exemplars = exemplars
    Handler.not_ready_because = staticmethod(not_ready_because)
    Handler.notes = staticmethod(notes)
    Handler.pages = staticmethod(pages)
    Handler.origins = frozenset(origins)
    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror}", hint=f"choose another {flag}"
        ) from error
    server.patience_s = patience_s
    server.context = tls.listening_context() if tls is not None else None
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="metrics-http", daemon=True)
    thread.start()
    return MetricsServer(host=host, port=server.server_address[1], _server=server, _thread=thread)


@dataclass(slots=True)
class _Open:
    """An accepted connection."""

    peer: str
    until_s: float  # on the monotonic clock
    connection: socket.socket  # under TLS it is another object than the one that was accepted


class _Server(ThreadingHTTPServer):
    """`context`: connections shake hands first, each in its own thread, so that nobody waits for one that does not."""

    daemon_threads = True
    context: ssl.SSLContext | None = None
    patience_s: float

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, _Open] = {}  # by the accepted socket; one that is not here is closed, or about to be
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for it. If not, it is closed at once."""
        peer = str(client_address[0])
        with self._lock:
            num_of_peer = sum(one.peer == peer for one in self._open.values())
            if len(self._open) >= CONNECTIONS_MAX or num_of_peer >= PEER_CONNECTIONS_MAX:
                return False
            self._open[request] = _Open(peer, time.monotonic() + self.patience_s, request)
            return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(self.patience_s)
        try:
            connection = request if self.context is None else self._shake_hands(request, self.context)
            super().finish_request(connection, client_address)
        except OSError:
            pass  # who hangs up, or cannot shake hands, is not worth a traceback

    def _shake_hands(self, request: Any, context: ssl.SSLContext) -> ssl.SSLSocket:
        connection = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open[request].connection = connection
        connection.do_handshake()
        return connection

    def service_actions(self) -> None:
        """Called between connections, and twice a second without any: wake the threads of those whose time is up."""
        with self._lock:
            for one in self._open.values():
                if one.until_s <= time.monotonic():
                    with suppress(OSError):  # as a plain socket: the thread may be at its TLS
                        socket.socket.shutdown(one.connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # from here on its number may be another connection's
            one = self._open.pop(request, None)
        super().shutdown_request(request if one is None else one.connection)


def openmetrics_page(collected: Collected) -> bytes:
    # With its default escaping prometheus_client 0.26 writes `vllm_` for `vllm:` in samples, though not in their types.
    page: bytes = openmetrics.generate_latest(collected, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return page


class _MetricsHandler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    exemplars: Collected | None
    not_ready_because: Callable[[], Sequence[str]]
    notes: Callable[[], Sequence[str]]
    pages: Pages
    origins: frozenset[str]
    protocol_version = "HTTP/1.1"
    server_version = "coppice"
    sys_version = ""  # versions are nobody's business

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if why_not := self._why_not(path):
            self._answer(403, why_not.encode() + b"\n", "text/plain; charset=utf-8")
        elif path == "/metrics":
            self._answer(200, *self._metrics())
        elif path == "/healthz":
            self._answer(200, b"ok\n", "text/plain; charset=utf-8")
        elif path == "/readyz":
            reasons = self.not_ready_because()
            body = "\n".join([*(reasons or ["ready"]), *self.notes()])
            self._answer(503 if reasons else 200, body.encode() + b"\n", "text/plain; charset=utf-8")
        elif (page := self.pages(path, query)) is not None and not self._is_answered_to():
            refusal = b"this host name is not answered to here; use an address in digits\n"
            self._answer(400, refusal, "text/plain; charset=utf-8")
        elif page is not None:
            self._answer(*page, headers=self._allowing())
        else:
            self._answer(404, b"known: /metrics /healthz /readyz\n", "text/plain; charset=utf-8")

    def _metrics(self) -> tuple[bytes, str]:
        if self.exemplars is not None and _OPENMETRICS in self.headers.get("Accept", ""):
            return openmetrics_page(self.exemplars), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    do_HEAD = do_GET  # noqa: N815  (the standard library's name; load balancers probe with HEAD)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line each."""

    def _why_not(self, path: str) -> str:
        """Why whoever shook hands may not ask for this; empty when it may, as all may without TLS."""
        if not isinstance(self.connection, ssl.SSLSocket):
            return ""
        try:
            return why_not_rest(identity_of(self.connection.getpeercert()), path)
        except NoIdentity:
            return "the certificate names nobody"

    def _is_answered_to(self) -> bool:
        """Without TLS a page that was led here under a name of its own (DNS rebinding) could read what it asks for: so
        `Host` must be an address in digits, this machine, or the host of an origin that may read it."""
        if isinstance(self.connection, ssl.SSLSocket):
            return True
        host = (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "").lower()
        try:
            ip_address(host)
        except ValueError:
            return host == "localhost" or host in {urlsplit(origin).hostname for origin in self.origins}
        return True

    def _allowing(self) -> dict[str, str]:
        """Headers that let a page's script read an answer, if it may. With TLS a browser shows the operator's
        certificate to another origin only where `credentials` are allowed; there are no others here."""
        if not self.origins:
            return {}
        asking = self.headers.get("Origin", "")
        if self.command != "GET" or asking not in self.origins:
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": asking,
            "Access-Control-Allow-Credentials": "true",
        }

    def _answer(self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
