"""Limits of the HTTP listener that uvicorn leaves open: slow senders, slow readers, too many of either.

    accepted --10 s--> first byte --10 s--> headers complete --30 s (in the app)--> body complete --> answer
                           |                                            write buffer full --10 s--> aborted
                           +-- one too many: 503, without reading it

A client that does not read in time loses its connection; the request behind it is cancelled by the disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coppice.processes.prompt_uvicorn import PromptServer
from coppice.tls.entrance import HANDSHAKE_S, HANDSHAKES_MAX, Handshakes, TlsEntrance, behind_tls
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, code_of, invalid
from coppice_scheduler.edge.base.file_limit import BACKLOG
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.base.request_id import HEADER, request_id_of
from coppice_scheduler.edge.http.cors import with_cors
from coppice_scheduler.edge.http.request_ids import RequestIds
from coppice_scheduler.edge.request_log.open_record import Log, current_record
from coppice_scheduler.edge.request_log.rest import RequestRecords
from coppice_scheduler.edge.rest_app import error_response
from coppice_scheduler.edge.silent_connections import SilentConnections

_BUSY_RETRY_MS = 1000
# Of one connection, in one turn; asyncio has 256 KiB, and many large bodies may come at once.
READ_BYTES = 64 * 1024
# What a client sends wrong is told to that client. In the log it would let anybody write, as often as they like.
_log = logging.getLogger("coppice.scheduler.connections")
_log.setLevel(logging.ERROR)

TurnedAway = Callable[[ErrorKind, str], None]  # with which error code


def _not_counted(kind: ErrorKind, code: str) -> None:
    """Where nobody counts."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_timeout_s: float = 10.0
    write_timeout_s: float = 10.0
    keep_alive_s: int = 5
    max_header_bytes: int = 16 * 1024
    max_headers: int = 64
    send_buffer_bytes: int = 128 * 1024
    max_requests: int = 10_000  # at once; above it a fast 503
    max_connections: int = 10_000
    max_handshakes: int = HANDSHAKES_MAX  # at once; above it whoever has been at it longest is cut
    handshake_timeout_s: float = HANDSHAKE_S
    excess_connections: int = 256  # above them and as many, the silent are cut, or newcomers where none is silent
    excess_timeout_s: float = 1.0

    @property
    def connections_in_all(self) -> int:
        return self.max_connections + self.excess_connections


def _config(
    app: ASGIApp,
    host: str,
    port: int,
    limits: HttpLimits,
    tls: PublicTls | None,
    cors_origins: tuple[str, ...],
    log: Log | None,
    turned_away: TurnedAway,
) -> uvicorn.Config:
    """Logs go to the process's own logging."""
    protocol = _limited_protocol(limits, turned_away)
    answers = with_cors(_Guard(app, limits), cors_origins)
    return uvicorn.Config(
        RequestIds(answers if log is None else RequestRecords(answers, log)),
        host=host,
        port=port,
        http=protocol if tls is None else _behind_tls(protocol, limits, tls),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_s,
        h11_max_incomplete_event_size=limits.max_header_bytes,
    )


class HttpServer(PromptServer):
    """uvicorn with a listener that keeps silent connections apart, and without its own signal handlers.

    `serve` wants the sockets to listen on; `host` and `port` are for logs.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits | None = None,
        tls: PublicTls | None = None,
        cors_origins: tuple[str, ...] = (),
        log: Log | None = None,
        turned_away: TurnedAway = _not_counted,
    ) -> None:
        """`turned_away` hears of connections that were refused before they had said a request."""
        self._limits = limits or HttpLimits()
        super().__init__(_config(app, host, port, self._limits, tls, cors_origins, log, turned_away))
        self._listeners: list[SilentConnections] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        for listener in sockets or ():
            listener.listen(BACKLOG)
            self._listeners.append(self._listens_on(listener))
        self.servers = self._listeners  # type: ignore[assignment]  # it closes them
        self.started = True

    def _listens_on(self, listener: socket.socket) -> SilentConnections:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        limits = self._limits
        return SilentConnections(
            listener,
            lambda: make(config=self.config, **state),
            num_open=lambda: len(self.server_state.connections),
            connections_max=limits.connections_in_all,
            timeout_s=limits.header_timeout_s,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    def cut_off(self) -> None:
        """End all connections, whatever their clients have not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Guard:
    """Bounds the number of headers and of requests at once."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if len(scope["headers"]) > self._limits.max_headers:
            refusal = invalid(f"The request has more than {self._limits.max_headers} headers.", code="too_many_headers")
            return await self._refuse(refusal, scope, receive, send)
        if self._active >= self._limits.max_requests:
            return await self._refuse(_busy("requests"), scope, receive, send)
        self._active += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._active -= 1

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        current_record().failed(code_of(error))
        await error_response(error)(scope, receive, send)


def _busy(what: str) -> ApiError:
    return ApiError(
        ErrorKind.UNAVAILABLE, f"Too many {what} at once.", code=f"too_many_{what}", retry_after_ms=_BUSY_RETRY_MS
    )


def _limited_protocol(limits: HttpLimits, turned_away: TurnedAway) -> type[H11Protocol]:
    """uvicorn wants a class, so what it needs is bound by making one."""

    class Limited(_LimitedProtocol):
        pass

    Limited.limits = limits
    Limited.turned_away = staticmethod(turned_away)
    return Limited


def _behind_tls(protocol: type[H11Protocol], limits: HttpLimits, tls: PublicTls) -> Callable[..., TlsEntrance]:
    handshakes = Handshakes(tls.channel, limits.connections_in_all, limits.max_handshakes, limits.handshake_timeout_s)
    return behind_tls(protocol, handshakes)


class _LimitedProtocol(H11Protocol):
    limits: HttpLimits
    turned_away: TurnedAway

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_excess = self._is_refused = False
        self.logger = _log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_excess = len(self.connections) > self.limits.max_connections
        transport.set_write_buffer_limits(high=self.limits.send_buffer_bytes)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's own name
        raw = transport.get_extra_info("socket")
        if raw is not None:
            # Without this the kernel takes megabytes for a client that does not read.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer_bytes)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_excess:
            self._refuse(_busy("connections"))
            return
        if not self._in_request():
            self._await_headers()
        super().data_received(data)
        if self._in_request():
            self._stop_header_timer()

    def on_response_complete(self) -> None:
        self.cycle.body.clear()  # of a body that was refused, what came until then; nobody reads it any more
        super().on_response_complete()
        self._stop_header_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid(f"This is no HTTP/1.1 request: {msg}", code="invalid_http"))

    def shutdown(self) -> None:
        """The server ends. A client that still owes a part of its request gets no answer to it any more."""
        if self._in_request() and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # Closing waits until the client has read what is left; not for ever.
        self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        if not self._is_refused:
            self._is_refused = True  # what else it sends is not one more
            self.turned_away(error.kind, code_of(error))
        self.transport.write(_raw_answer(error))
        self.transport.close()

    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._header_timer is None:
            limits = self.limits
            timeout_s = limits.excess_timeout_s if self._is_excess else limits.header_timeout_s
            self._header_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _raw_answer(error: ApiError) -> bytes:
    response = error_response(error)
    status = b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())
    response.headers[HEADER] = request_id_of(None).shown
    lines = [b"%s: %s" % header for header in response.raw_headers]
    return b"\r\n".join([status, *lines, b"connection: close", b"", bytes(response.body)])
