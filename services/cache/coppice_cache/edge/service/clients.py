"""Sessions of schedulers and other clients: which epoch is reached over which link.

A session is attached in the core before its link exists, so what the core says meanwhile waits in `pending`. Sessions
of clients that use the unary forms have no link; what the core says to them unasked goes nowhere. They name their
session by a random number: epochs are counted, so anybody could name another's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coppice.edge import codec
from coppice.edge.link_server import LinkServer, SessionRefused
from coppice.ids import SchedulerEpoch
from coppice.messages.index import TenantsVersion, ToClient
from coppice.messages.ownership import Yielded
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import ServerLink, ServerLinks
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.index import IndexCore
from coppice_cache.edge.service.locked_core import LockedCore, Outlived

Receive = Callable[[SchedulerEpoch, Any, IndexCore], None]  # one message of a session; raises MessageRefused

_log = logging.getLogger("coppice.cache")
_NO_KEY = b""


@dataclass(slots=True)
class _Client:
    key: bytes  # of the session; _NO_KEY for a client of the unary forms
    name: int = 0  # of a session of the unary forms
    link: ServerLink[Any] | None = None
    pending: list[ToClient] = field(default_factory=list)


class ClientSessions:
    """Methods named `session_...` are the link server's; the others are called with the service's lock held."""

    def __init__(
        self,
        locked: LockedCore,
        links: ServerLinks[Any],
        *,
        outlived: Outlived,
        receive: Receive,
        now_ns: Callable[[], int],
        tenants_version: str,
    ) -> None:
        self._tenants = TenantsVersion(tenants_version)
        self._locked = locked
        self._outlived = outlived
        self._receive = receive
        self._now_ns = now_ns
        self.server = LinkServer(links, codec.INDEX, self)
        self._by_epoch: dict[SchedulerEpoch, _Client] = {}
        self._unary: dict[int, SchedulerEpoch] = {}  # by name

    # ---- with the lock held ----

    def tell(self, epoch: SchedulerEpoch, message: ToClient) -> None:
        client = self._by_epoch.get(epoch)
        if client is None or client.key == _NO_KEY:
            return
        if client.link is None:
            client.pending.append(message)
        elif not self.server.post(client.link, message):
            _log.warning("session %d takes no messages; it has to attach again", epoch)
            client.link = None

    def ended(self, epoch: SchedulerEpoch) -> None:
        client = self._by_epoch.pop(epoch, None)
        if client is None:
            return
        self._unary.pop(client.name, None)
        _log.info("session %d ended", epoch)
        if client.link is not None:
            farewell = Reject(RejectCode.FENCED, f"session epoch {epoch} is over: it was silent for too long")
            self.server.end(client.link, farewell)

    def set_tenants_version(self, version: str) -> None:
        self._tenants = TenantsVersion(version)
        for epoch, client in self._by_epoch.items():
            if client.link is not None:
                self.tell(epoch, self._tenants)

    def forget_all(self) -> None:
        self._by_epoch.clear()
        self._unary.clear()

    def _is_current(self, link: ServerLink[Any]) -> bool:
        client = self._by_epoch.get(SchedulerEpoch(link.epoch))
        return client is not None and client.link is link

    # ---- the unary forms ----

    def open_unary(self) -> int:
        """The name of the session, for whoever opened it. Raises MessageRefused."""
        with self._locked.entered() as core:
            epoch = core.attach_client(SchedulerEpoch(0), self._now_ns(), plans=False)
            name = secrets.randbits(64) | 1  # 0 names none
            self._by_epoch[epoch] = _Client(_NO_KEY, name)
            self._unary[name] = epoch
            return name

    def renew_unary(self, name: int) -> SchedulerEpoch | None:
        """Count as heard; the epoch of the session. None: there is no such session (any more)."""
        with self._locked.entered() as core:
            epoch = self._unary.get(name)
            if epoch is not None:
                core.heard_client(epoch, self._now_ns())
            return epoch

    def close_unary(self, name: int) -> None:
        with self._locked.entered() as core:
            epoch = self._unary.get(name)
            if epoch is not None:
                core.end_client(epoch, self._now_ns())

    # ---- sessions that stay open ----

    def session_opening(self, hello: Hello) -> int | Reject:
        if (reject := self._outlived(hello)) is not None:
            return reject
        try:
            with self._locked.entered() as core:
                _, claimed = core.believed(hello)
                holder = self._by_epoch.get(claimed)
                if holder is not None and holder.key != hello.key:
                    claimed = SchedulerEpoch(0)  # somebody else's by now: after a restart that forgot its own epoch
                may_yield = hello.versions.highest >= Yielded.SINCE
                epoch = core.attach_client(claimed, self._now_ns(), may_yield=may_yield)
                known = self._by_epoch.get(epoch)
                if known is None or known.link is None or known.link.is_ended:
                    self._by_epoch[epoch] = _Client(hello.key)
        except MessageRefused as refused:
            return Reject(RejectCode.NOT_READY, str(refused))
        _log.info("session %d opened for %s%s", epoch, hello.name, "" if epoch == hello.epoch else " (a new epoch)")
        return epoch

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        with self._locked.entered() as core:
            epoch = SchedulerEpoch(link.epoch)
            client = self._by_epoch.get(epoch)
            if client is None or client.key != link.key:
                # It ended between its opening and now.
                self.server.end(link, Reject(RejectCode.FENCED, f"session epoch {epoch} is over"))
                return
            core.heard_client(epoch, self._now_ns())
            client.link = link
            pending, client.pending = client.pending, []
            for message in (*pending, self._tenants):
                self.tell(epoch, message)

    def session_heard(self, link: ServerLink[Any]) -> None:
        with self._locked.entered() as core:
            if self._is_current(link):
                core.heard_client(SchedulerEpoch(link.epoch), self._now_ns())

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        try:
            with self._locked.entered() as core:
                if self._is_current(link):
                    self._receive(SchedulerEpoch(link.epoch), body, core)
        except MessageRefused as refused:
            raise SessionRefused(str(refused)) from refused
