"""The scheduler's sessions: one to the cache service, one to every worker that it tells of.

Handlers run on the links' threads and hand over to the planner's inbox. What comes from a client that was replaced
meanwhile is dropped there, because the planner asks whether the sender is still the one it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from coppice.addresses import UnixAddress, parse_session_address
from coppice.edge import codec
from coppice.edge.link_client import LinkClient
from coppice.edge.told_once import ToldOnce
from coppice.errors import UsageError
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerId
from coppice.messages.index import FromClient, ToClient, WorkerInfo, Workers
from coppice.messages.ownership import SessionName
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Reject, RejectCode
from coppice.session.link import Attached
from coppice.tls.credentials import Credentials

_log = logging.getLogger(__name__)

Inbox = Callable[[Callable[[], None]], None]  # hand over to the planner's turns


class IndexClient:
    """The session to the cache service. `attached`, `message` and `lost` run in the planner's turns."""

    def __init__(
        self,
        address: str,
        name: str,
        inbox: Inbox,
        attached: Callable[[Attached], None],
        message: Callable[[ToClient], None],
        lost: Callable[[], None],
        tls: Credentials | None,
    ) -> None:
        self._address = address
        self._inbox = inbox
        self._attached = attached
        self._message = message
        self._lost = lost
        self._attachment = 0  # the one that the planner knows of
        self._link = LinkClient(codec.INDEX, address, self, name, "cache", tls=tls)

    def start(self) -> None:
        self._link.start()

    def stop(self) -> None:
        self._link.stop()

    def post(self, message: FromClient) -> None:
        self._link.post(message, self._attachment)

    @property
    def session(self) -> SessionName:
        """As it was attached last."""
        key, incarnation, epoch, voucher = self._link.shown
        return SessionName(key, incarnation, SchedulerEpoch(epoch), voucher)

    def renew(self) -> None:
        """Give the session up and open another one, under another epoch."""
        self._link.renew()

    def link_attached(self, attached: Attached, attachment: int) -> None:
        def hand_over() -> None:
            self._attachment = attachment
            self._attached(attached)

        self._inbox(hand_over)

    def link_body(self, body: Any, attachment: int) -> None:
        self._inbox(lambda: self._message(body))

    def link_lost(self, reason: str) -> None:
        _log.warning("lost the cache service: %s", reason)
        self._inbox(self._lost)

    def link_rejected(self, reject: Reject) -> None:
        _log.warning("the cache service at %s refuses the session: %s", self._address, reject.message)


class WorkerClient:
    """The session to one worker, under one scheduler epoch."""

    def __init__(
        self,
        info: WorkerInfo,
        epoch: SchedulerEpoch,
        name: str,
        inbox: Inbox,
        owner: WorkerClients,
        tls: Credentials | None,
    ) -> None:
        self.worker_id = info.worker_id
        self.address = info.address
        self._inbox = inbox
        self._owner = owner
        self._attachment = 0
        self._link = LinkClient(
            codec.STEPS,
            info.address,
            self,
            name,
            info.worker_id,
            epoch=epoch,
            voucher=info.voucher,
            tls=tls,
            certified=info.worker_id,
            nobody_listens=self._nobody_listens,
        )

    def start(self) -> None:
        """Raises RuntimeError when there is no thread to be had."""
        self._link.start()

    def take_voucher(self, voucher: bytes) -> None:
        """For the handshakes to come: the worker has another epoch now, or is back under the same."""
        self._link.take_voucher(voucher)

    def stop(self) -> None:
        """Does not wait: a turn stops it, and its thread may be at a connection that nobody answers."""
        self._link.stop(wait=False)

    def post(self, plan: StepPlan) -> None:
        self._link.post(plan, self._attachment)

    def link_attached(self, attached: Attached, attachment: int) -> None:
        def hand_over() -> None:
            self._attachment = attachment
            self._owner.attached(self, attached)

        self._inbox(hand_over)

    def link_body(self, body: Any, attachment: int) -> None:
        self._inbox(lambda: self._owner.result(self, body))

    def link_lost(self, reason: str) -> None:
        _log.warning("lost worker %s: %s", self.worker_id, reason)
        self._inbox(lambda: self._owner.lost(self))

    def _nobody_listens(self) -> None:
        self._inbox(lambda: self._owner.gone(self))

    def link_rejected(self, reject: Reject) -> None:
        _log.warning("worker %s at %s refuses the session: %s", self.worker_id, self.address, reject.message)
        if reject.code is RejectCode.FENCED:
            self._inbox(lambda: self._owner.fenced(self))


class WorkerClients:
    """Keeps one client for every worker that the cache service lists as ours. Touched in the planner's turns only.

    A worker says itself where it is. One whose address is none is left out, and with `tls` so is one on a Unix socket,
    which nobody would look at the certificate of, unless the cache service `is_local`, too. One that there is no
    thread for waits until there is.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        attached: Callable[[WorkerId, Attached], None],
        result: Callable[[WorkerId, StepResult], None],
        lost: Callable[[WorkerId], None],
        gone: Callable[[WorkerId], None],
        fenced: Callable[[], None],
        tls: Credentials | None,
        *,
        is_local: bool,
    ) -> None:
        self._takes_unix = is_local or tls is None
        self._told = ToldOnce()
        self._name = name
        self._tls = tls
        self._inbox = inbox
        self._fenced = fenced
        self._attached = attached
        self._result = result
        self._lost = lost
        self._gone = gone
        self._clients: dict[WorkerId, WorkerClient] = {}
        self._waiting: dict[WorkerId, WorkerInfo] = {}  # for a thread
        self._attached_ids: set[WorkerId] = set()
        self._listed_under: dict[WorkerId, CacheEpoch] = {}
        self._epoch = SchedulerEpoch(0)

    @property
    def num_attached(self) -> int:
        return len(self._attached_ids)

    def new_epoch(self, epoch: SchedulerEpoch) -> None:
        """Sessions belong to one scheduler epoch: under another one they are opened anew as workers are listed."""
        if epoch != self._epoch:
            self.stop()
            self._epoch = epoch

    def listed(self, message: Workers) -> None:
        """A cache service that just came back lists nobody yet: only who was listed by it before is gone."""
        wanted = {info.worker_id: info for info in message.workers}
        for worker_id, client in list(self._clients.items()):
            if worker_id in wanted:
                info = wanted[worker_id]
                gone = info.address != client.address or not info.is_owned
            else:
                gone = self._listed_under.get(worker_id) == message.cache_epoch
            if gone:
                self._drop(worker_id)
        for worker_id, info in wanted.items():
            self._listed_under[worker_id] = message.cache_epoch
            known = self._clients.get(worker_id)
            if known is not None:
                known.take_voucher(info.voucher)
            elif info.is_owned and self._is_usable(info):
                self._open(info)
            else:
                self._waiting.pop(worker_id, None)
        self._waiting = {worker_id: info for worker_id, info in self._waiting.items() if worker_id in wanted}

    def tend(self) -> None:
        """Try again what there was no thread for."""
        for info in list(self._waiting.values()):
            self._open(info)

    def _open(self, info: WorkerInfo) -> None:
        client = WorkerClient(info, self._epoch, self._name, self._inbox, self, self._tls)
        try:
            client.start()
        except RuntimeError as error:  # at a limit of processes; all other streams go on
            if info.worker_id not in self._waiting:
                _log.error("worker %s is left out until there is a thread for it: %s", info.worker_id, error)
            self._waiting[info.worker_id] = info
            return
        self._waiting.pop(info.worker_id, None)
        self._clients[info.worker_id] = client

    def _is_usable(self, info: WorkerInfo) -> bool:
        try:
            if not isinstance(parse_session_address(info.address), UnixAddress) or self._takes_unix:
                return True
            reason = "it is on a Unix socket, and the cache service is not"
        except UsageError as error:
            reason = str(error)
        if self._told.is_new(f"{info.worker_id}: {reason}"):
            _log.error("worker %s is left out: %s", info.worker_id, reason)
        return False

    def post(self, worker_id: WorkerId, plan: StepPlan) -> None:
        client = self._clients.get(worker_id)
        if client is not None:
            client.post(plan)

    def stop(self) -> None:
        self._waiting.clear()
        for worker_id in list(self._clients):
            self._drop(worker_id)

    def _drop(self, worker_id: WorkerId) -> None:
        self._attached_ids.discard(worker_id)
        self._listed_under.pop(worker_id, None)
        self._clients.pop(worker_id).stop()
        self._lost(worker_id)

    # ---- from clients ----

    def attached(self, client: WorkerClient, attached: Attached) -> None:
        if self._is_current(client):
            self._attached_ids.add(client.worker_id)
            self._attached(client.worker_id, attached)

    def result(self, client: WorkerClient, result: StepResult) -> None:
        if self._is_current(client):
            self._result(client.worker_id, result)

    def lost(self, client: WorkerClient) -> None:
        if self._is_current(client):
            self._attached_ids.discard(client.worker_id)
            self._lost(client.worker_id)

    def gone(self, client: WorkerClient) -> None:
        """Nobody listens at its address."""
        if self._is_current(client):
            self._gone(client.worker_id)

    def fenced(self, client: WorkerClient) -> None:
        if self._is_current(client):
            self._fenced()

    def _is_current(self, client: WorkerClient) -> bool:
        return self._clients.get(client.worker_id) is client
