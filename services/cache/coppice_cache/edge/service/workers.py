"""Sessions of workers: one link per worker id, the newest process that claims the id wins."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coppice.edge import codec
from coppice.edge.link_server import LinkServer, SessionRefused
from coppice.ids import WorkerEpoch, WorkerId
from coppice.messages.registration import Registered, ToWorker
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import ServerLink, ServerLinks
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.edge.service.locked_core import LockedCore, Outlived

_log = logging.getLogger("coppice.cache")
WORKER_ID_BYTES_MAX = 128
REPLACED_KEYS_MAX = 1_024


@dataclass(slots=True)
class _End:
    link: ServerLink[Any]
    epoch: WorkerEpoch | None = None  # what this link was registered as


class WorkerSessions:
    """Methods named `session_...` are the link server's; the others are called with the service's lock held."""

    def __init__(
        self,
        locked: LockedCore,
        links: ServerLinks[Any],
        *,
        outlived: Outlived,
        now_ns: Callable[[], int],
    ) -> None:
        self._locked = locked
        self._outlived = outlived
        self._now_ns = now_ns
        self.server = LinkServer(links, codec.WORKERS, self)
        self._by_id: dict[WorkerId, _End] = {}
        # A process that lost its id to a newer one must not come back and take it again, for ever in turns.
        self._replaced_keys: OrderedDict[bytes, None] = OrderedDict()
        self._num_sessions = 0

    # ---- with the lock held ----

    def tell(self, worker_id: WorkerId, message: ToWorker) -> None:
        end = self._by_id.get(worker_id)
        if end is None:
            return
        if isinstance(message, Registered):
            end.epoch = message.worker_epoch
            _log.info("worker %s registered with epoch %d", worker_id, message.worker_epoch)
        if not self.server.post(end.link, message):
            _log.warning("worker %s takes no messages; it has to register again", worker_id)

    def ended(self, worker_id: WorkerId, worker_epoch: WorkerEpoch) -> None:
        """The epoch is dead; a session that speaks for it ends. One that is about to replace it goes on."""
        _log.info("worker %s: epoch %d is dead", worker_id, worker_epoch)
        end = self._by_id.get(worker_id)
        if end is not None and end.epoch == worker_epoch:
            del self._by_id[worker_id]
            farewell = Reject(RejectCode.FENCED, f"worker epoch {worker_epoch} is dead; register again")
            self.server.end(end.link, farewell)

    def forget_all(self) -> None:
        self._by_id.clear()

    def _is_current(self, link: ServerLink[Any]) -> bool:
        end = self._by_id.get(WorkerId(link.name))
        return end is not None and end.link is link

    # ---- sessions that stay open ----

    def session_opening(self, hello: Hello) -> int | Reject:
        if not 0 < len(hello.name.encode()) <= WORKER_ID_BYTES_MAX:
            return Reject(RejectCode.INVALID, f"Hello.name is the worker id: 1 to {WORKER_ID_BYTES_MAX} bytes")
        if (reject := self._outlived(hello)) is not None:
            return reject
        with self._locked.entered():
            if hello.key in self._replaced_keys:
                return Reject(RejectCode.FENCED, f"a newer process is registered as worker {hello.name!r}")
            self._num_sessions += 1
            return self._num_sessions

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        with self._locked.entered() as core:
            worker_id = WorkerId(link.name)
            end = self._by_id.get(worker_id)
            if end is not None and end.link is not link and end.link.epoch > link.epoch:
                # Sessions are numbered as they open: this one was overtaken on its way here.
                self._replace(worker_id, link, end.link)
                return
            if end is None or end.link is not link:
                self._by_id[worker_id] = _End(link)
                if end is not None:
                    self._replace(worker_id, end.link, link)
            core.heard_worker(worker_id, self._now_ns())

    def _replace(self, worker_id: WorkerId, old: ServerLink[Any], new: ServerLink[Any]) -> None:
        farewell = None
        if old.key != new.key:
            _log.warning("worker %s: a newer process took over", worker_id)
            self._replaced_keys[old.key] = None
            if len(self._replaced_keys) > REPLACED_KEYS_MAX:
                self._replaced_keys.popitem(last=False)
            farewell = Reject(RejectCode.FENCED, f"a newer process is registered as worker {worker_id!r}")
        self.server.end(old, farewell)

    def session_heard(self, link: ServerLink[Any]) -> None:
        with self._locked.entered() as core:
            if self._is_current(link):
                core.heard_worker(WorkerId(link.name), self._now_ns())

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        try:
            with self._locked.entered() as core:
                if self._is_current(link):
                    unproved = core.state.unproved_registrations
                    core.receive_worker(WorkerId(link.name), body, self._now_ns())
                    if core.state.unproved_registrations > unproved:
                        _log.warning(
                            "worker %r shows no voucher of ours for its epochs; its pool begins anew", link.name
                        )
        except MessageRefused as refused:
            raise SessionRefused(str(refused)) from refused
