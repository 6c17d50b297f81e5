"""The planners of other schedulers that a front door looks for: addresses that names stand for now, a port for each.

HOST:PORT --looked up every few seconds--> addresses --> PeerPort each, as long as its name has it
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from coppice.addresses import Address
from coppice.edge.told_once import Outage
from coppice.tls.channel import tls_reason
from coppice.tls.credentials import Credentials
from coppice.tls.identity import NoIdentity, identity_of
from coppice.tls.rights import why_not_server
from coppice_scheduler.edge.ipc.links import PlannerLink
from coppice_scheduler.edge.ipc.peers.port import TOLD_AFTER_S, TOLD_AGAIN_S, PeerPort, ReachPeer

_log = logging.getLogger("coppice.scheduler")
LOOK_S = 3.0
ADDRESSES_MAX = 256  # of all names together
KIND = "doors"  # of session, in the table of rights


class Peers:
    """Belongs to one asyncio loop. `port_at` makes the port for an address."""

    def __init__(self, names: Sequence[Address], port_at: Callable[[Address], PeerPort]) -> None:
        self._names = names
        self._port_at = port_at
        self._found: dict[Address, list[Address]] = {}  # by name, as looked up last
        self._outages = {name: Outage(TOLD_AFTER_S, TOLD_AGAIN_S) for name in names}
        self._keeping: dict[Address, tuple[PeerPort, asyncio.Task[None]]] = {}

    async def keep(self) -> None:
        """Look for them until it is cancelled."""
        try:
            while True:
                await asyncio.gather(*map(self._look_up, self._names))
                self._follow({address for found in self._found.values() for address in found})
                await asyncio.sleep(LOOK_S)
        finally:
            for _, task in self._keeping.values():
                task.cancel()

    async def _look_up(self, name: Address) -> None:
        """What was found before stays where it cannot be looked up."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # also of what is no name
            if self._outages[name].lasts_s(loop.time(), str(error)) is not None:
                _log.warning("--planner-peers %s cannot be looked up: %s", name, error)
            return
        self._outages[name].end()
        self._found[name] = [Address(str(entry[4][0]), name.port) for entry in entries]

    def _follow(self, addresses: set[Address]) -> None:
        """Have a port for each of them, and for no others but those where a planner is."""
        for address, (port, task) in list(self._keeping.items()):
            if address not in addresses and not port.is_there:
                task.cancel()
                del self._keeping[address]
        for address in sorted(addresses - self._keeping.keys(), key=str):
            if len(self._keeping) >= ADDRESSES_MAX:
                _log.error("--planner-peers names more than %d addresses; %s is left out", ADDRESSES_MAX, address)
                return
            port = self._port_at(address)
            self._keeping[address] = port, asyncio.create_task(port.keep())


def reaching(tls: Credentials | None) -> ReachPeer:
    """Connects over TCP; with `tls` to a scheduler with a certificate of the CA alone."""

    async def reach(address: Address, link: PlannerLink) -> object:
        loop = asyncio.get_running_loop()
        context = None if tls is None else tls.client_context()
        try:
            transport, _ = await loop.create_connection(lambda: link, address.host, address.port, ssl=context)
        except ssl.SSLError as error:
            raise ConnectionError(tls_reason(error)) from error
        if context is not None:
            try:
                why_not = why_not_server(identity_of(transport.get_extra_info("peercert")), KIND, "")
            except NoIdentity as error:
                why_not = str(error)
            if why_not:
                raise ConnectionError(why_not)
        return transport

    return reach
