"""A stand-in for the cache service's side of a worker session: registers every worker, sends fences, keeps answers."""

from __future__ import annotations

import queue
from typing import Any

from coppice.addresses import Address
from coppice.edge import codec
from coppice.edge.link_server import LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import Fence, Register, Registered, ToWorker
from coppice.session.frames import Hello, Reject
from coppice.session.link import ClientLink, ServerLink, ServerLinks
from coppice.session.vouchers import scheduler_voucher

SCHEDULER_KEY = b"key of schedulers"


def registered(epoch: WorkerEpoch) -> Registered:
    return Registered(epoch, CacheEpoch(1), b"voucher", SCHEDULER_KEY)


def vouched(link: ClientLink[Any], epoch: int) -> ClientLink[Any]:
    """The link of a scheduler with this epoch, for which the registrar vouches."""
    link.epoch, link.voucher = epoch, scheduler_voucher(SCHEDULER_KEY, SchedulerEpoch(epoch))
    return link


class Registrar:
    """Worker epochs count from 1 for workers that have none; `received` holds every body that came."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()
        self._epochs = 0
        self._link: ServerLink[Any] | None = None
        self._links = LinkServer(ServerLinks(1, 1), codec.WORKERS, self)
        self._listener = SessionListener(Address("127.0.0.1", 0))
        self._listener.start((self._links,))
        self.address = str(self._listener.address)

    def fence(self, fence: Fence) -> None:
        self.tell(fence)

    def tell(self, message: ToWorker) -> None:
        assert self._link is not None
        self._links.post(self._link, message)

    def restart(self) -> None:
        """Forget every session, as a restarted service would."""
        self._links.replace(ServerLinks(2, 2))

    def close(self) -> None:
        self._listener.close()
        self._links.close()

    def session_opening(self, hello: Hello) -> int | Reject:
        return 1

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        self._link = link

    def session_heard(self, link: ServerLink[Any]) -> None:
        """Nobody expires here."""

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        if isinstance(body, Register):
            epoch = body.worker_epoch
            if not epoch:
                self._epochs += 1
                epoch = WorkerEpoch(self._epochs)
            self._links.post(link, registered(epoch))
        self.received.put(body)
