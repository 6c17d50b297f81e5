"""Limits of the admin listener that uvicorn leaves open: clients that do not send, and clients that do not read.

connection made, or the next request begins --15 s--> request complete --> answer
                                                      write buffer full --15 s--> aborted
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from coppice.tls.identity import NoIdentity, identity_of
from coppice_cache.edge.api.guard import PEER

PATIENCE_S = 15.0  # for a whole request with its body, and for a client that reads nothing of its answer


class AdminProtocol(H11Protocol):
    """One connection."""

    patience_s = PATIENCE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is not None:
            self._introduce(transport.get_extra_info("peercert"))
        self._request_timer = self._timer()

    def data_received(self, data: bytes) -> None:
        if self._request_timer is None and self._is_answered():
            self._request_timer = self._timer()
        super().data_received(data)
        if not self._is_answered() and not self.cycle.more_body:
            self._stop_request_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self._timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _introduce(self, certificate: dict[str, Any] | None) -> None:
        """Tell the app who asks on this connection."""
        try:
            peer = identity_of(certificate)
        except NoIdentity:
            return
        app = self.app

        async def introduced(scope: Any, receive: Any, send: Any) -> None:
            scope[PEER] = peer
            await app(scope, receive, send)

        self.app = introduced

    def _is_answered(self) -> bool:
        """Whether nothing is asked, or what was asked has its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _timer(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.patience_s, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
