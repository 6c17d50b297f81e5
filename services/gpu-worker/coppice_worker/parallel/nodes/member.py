"""A rank's end of its link: commands, copies, and how it meets the others."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time

from torch._C._distributed_c10d import Store

from coppice.addresses import Address
from coppice.edge import session_socket
from coppice.edge.told_once import Outage
from coppice.edge.wire import Wire, WireClosed, WireSilent
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.loading import Loaded
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.parallel.errors import LinkLost, NodeRefused, StoppedEarly
from coppice_worker.parallel.gloo_group import GlooGroup
from coppice_worker.parallel.invitation import Invitation, SeveralMachines
from coppice_worker.parallel.nodes.handshake import Comer, introduce
from coppice_worker.parallel.nodes.link import Kind, Link
from coppice_worker.parallel.nodes.listener import TOLD_AFTER_S, TOLD_AGAIN_S
from coppice_worker.parallel.nodes.networks import interface_of
from coppice_worker.parallel.nodes.store import MeetingStore, StoreOverLink
from coppice_worker.parallel.nodes.terms import facts_of, terms_of
from coppice_worker.parallel.torch_group import TorchGroup

_log = logging.getLogger(__name__)
CONNECT_S = 5.0
RETRY_S = 0.5
JOIN_S = 60.0  # a rank whose node was taken a moment ago
FAREWELL_S = 30.0


class Membership:
    """A rank among ranks on several machines. Its link runs on a thread; a link that is lost ends the process."""

    def __init__(self, invitation: Invitation, place: SeveralMachines) -> None:
        """Raises NodeRefused, LinkLost."""
        self._invitation = invitation
        self._host = place.host
        if place.descriptor is not None:
            self.link = Link(Wire(socket.socket(fileno=place.descriptor)), "rank 0")
        else:
            self.link = _join_as_rank(invitation, place)
        self._store = StoreOverLink(self.link)
        self._said_farewell = threading.Event()
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def join(self) -> GlooGroup | TorchGroup:
        """Blocks until all ranks have come."""
        return meet(self._invitation.settings, self._invitation.rank, MeetingStore(self._store.ask), self._host)

    def say_loaded(self, loaded: Loaded) -> None:
        self.link.send(Kind.LOADED, json.dumps(facts_of(loaded)).encode())

    def _run(self) -> None:
        try:
            self.link.run()
            self._said_farewell.set()
        except LinkLost as error:
            _log.critical("rank 0 is lost: %s; this rank ends with it", error)
            exit_now()

    def ended_in_order(self, wait_s: float) -> bool:
        """Whether rank 0 bids farewell."""
        return self._said_farewell.wait(wait_s)


def meet(settings: WorkerSettings, rank: int, store: Store, host: str) -> GlooGroup | TorchGroup:
    """Blocks until all ranks have come. `host`: address of this machine where the others reach this rank."""
    if settings.device == "cpu":
        return GlooGroup(rank, settings.tensor_parallel, store, host)
    return TorchGroup(
        rank, settings.tensor_parallel, store, device=settings.device_of(rank), interface=interface_of(host)
    )


def join_as_node(
    settings: WorkerSettings, tls: Credentials | None, stopping: StopRequests
) -> tuple[Link, SeveralMachines]:
    """Waits until node 0 is there and takes this node; says for whom it waits. Returns the node's link, and what its
    ranks are told. Raises NodeRefused, StoppedEarly."""
    comer = Comer(node=settings.node_rank, terms=terms_of(settings))
    outage = Outage(TOLD_AFTER_S, TOLD_AGAIN_S)
    address = settings.meets_at
    while True:
        try:
            return _introduced(address, comer, tls)
        except (OSError, WireClosed, WireSilent) as error:
            reason = _why(error)
        if outage.lasts_s(time.monotonic(), reason) is not None:
            _log.info("waiting for node 0 at %s: %s", address, reason)
        if stopping.asked.wait(RETRY_S):
            raise StoppedEarly(f"told to stop while waiting for node 0 at {address}")


def _join_as_rank(invitation: Invitation, place: SeveralMachines) -> Link:
    settings = invitation.settings
    tls = settings.credentials(Role.WORKER)
    comer = Comer(node=settings.node_rank, rank=invitation.rank, life=place.life, terms=terms_of(settings))
    ends_s = time.monotonic() + JOIN_S
    while True:
        try:
            return _introduced(settings.meets_at, comer, tls)[0]
        except (OSError, WireClosed, WireSilent) as error:
            if time.monotonic() > ends_s:
                raise NodeRefused(f"node 0 does not answer at {settings.meets_at}: {_why(error)}") from error
            time.sleep(RETRY_S)


def _introduced(address: Address, comer: Comer, tls: Credentials | None) -> tuple[Link, SeveralMachines]:
    """Raises NodeRefused, OSError, WireClosed, WireSilent."""
    connection = session_socket.connect(address, CONNECT_S)
    host = str(connection.getsockname()[0])
    wire = Wire(connection)
    try:
        life = introduce(wire, comer, tls)
    except BaseException:
        wire.close()
        raise
    return Link(wire, "node 0"), SeveralMachines(host=host, life=life)


def _why(error: Exception) -> str:
    if isinstance(error, WireSilent):
        return "whoever is there says nothing"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
