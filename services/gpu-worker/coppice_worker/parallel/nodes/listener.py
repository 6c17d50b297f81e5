"""Node 0 waits for all others: a thread for each connection.

    a connection --10 s--> hands are shaken, it says who comes --> a link, for as long as the worker lives
         |                    +-- nothing, garbage, a stranger, other terms, another life: refused, and closed
         +-- one more than 128 that are at it: waits until one of them is known

When all are there it stops listening. A node that was taken and is lost ends the worker, also while others are awaited.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from coppice.addresses import Address
from coppice.edge.acceptor import Acceptor
from coppice.edge.told_once import Outage, ToldOnce
from coppice.edge.wire import Wire, WireClosed, WireSilent, WireUntrusted
from coppice.errors import UnavailableError
from coppice.tls.credentials import Credentials
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.errors import LinkLost, StoppedEarly
from coppice_worker.parallel.nodes.handshake import (
    HANDSHAKE_S,
    REFUSAL_CHARACTERS_MAX,
    Answer,
    Comer,
    Stranger,
    receive_comer,
)
from coppice_worker.parallel.nodes.link import SILENCE_S, Link
from coppice_worker.parallel.nodes.terms import Terms, difference

_log = logging.getLogger(__name__)
HANDSHAKES_MAX = 128
LOOK_S = 0.2
TOLD_AFTER_S = 2.0
TOLD_AGAIN_S = 60.0
_LIFE_BYTES = 16
Taken = Callable[[Comer, Link], None]
Lost = Callable[[str, str], None]


class NodeListener:
    """Listens from the start on. `host`: the address that the name of `--dist-init-addr` stands for.

    `taken` is called with each link before it runs, and waits for nothing; `lost` with who it was and how, when one
    ends out of order. Both are called on threads of links. Raises UnavailableError, StoppedEarly.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        terms: Terms,
        tls: Credentials | None,
        stopping: StopRequests,
        taken: Taken,
        lost: Lost,
        *,
        silence_s: float = SILENCE_S,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.life = secrets.token_hex(_LIFE_BYTES)
        self._settings, self._terms, self._tls = settings, terms, tls
        self._stopping = stopping
        self._taken, self._lost = taken, lost
        self._silence_s, self._handshake_s = silence_s, handshake_s
        self._told = ToldOnce()
        self._changed = threading.Condition()
        self._links: dict[tuple[int, int | None], Link] = {}  # by node and rank
        listener = listen_when_named(settings.meets_at, stopping)
        self.host = str(listener.getsockname()[0])
        self._acceptor = Acceptor(listener, self._begin, most=HANDSHAKES_MAX, what="nodes")
        self._acceptor.start()

    def wait(self) -> None:
        """Until all nodes and all their ranks have come; says for whom it waits. Raises StoppedEarly."""
        outage = Outage(TOLD_AFTER_S, TOLD_AGAIN_S)
        while missing := self._missing():
            if self._stopping.asked.is_set():
                raise StoppedEarly(f"told to stop while waiting for {missing}")
            if outage.lasts_s(time.monotonic(), missing) is not None:
                _log.info("waiting for %s at %s", missing, self._settings.meets_at)
            with self._changed:
                self._changed.wait(LOOK_S)
        self.close()

    def close(self) -> None:
        """Nobody comes in any more; links stay."""
        self._acceptor.close()

    def _missing(self) -> str:
        """For a person; empty when all are there."""
        settings = self._settings
        with self._changed:
            nodes = [f"node {node}" for node in range(1, settings.nnodes) if (node, None) not in self._links]
            ranks = [
                f"rank {rank} of node {node}"
                for node in range(1, settings.nnodes)
                for rank in ranks_of(settings, node)
                if (node, rank) not in self._links
            ]
        return ", ".join(nodes or ranks)

    def _begin(self, connection: socket.socket, peer: Any, over: Callable[[], None]) -> None:
        args = Wire(connection), str(peer[0]), over
        threading.Thread(target=self._serve, args=args, name="a node's connection", daemon=True).start()

    def _serve(self, wire: Wire, host: str, over: Callable[[], None]) -> None:
        try:
            found = self._shake_hands(wire, host)
            if found is None:
                wire.finish()
                return
        finally:
            over()
        who, link = found
        _log.info("%s is here", who)
        try:
            link.run()
        except LinkLost as error:
            self._lost(who, str(error))
        finally:
            wire.finish()

    def _shake_hands(self, wire: Wire, host: str) -> tuple[str, Link] | None:
        """Who it is, for a person. None: it was refused."""
        try:
            comer = receive_comer(wire, self._tls, self._handshake_s)
        except (WireUntrusted, Stranger) as error:
            self._refused(f"{host}: {error}")
        except (WireClosed, WireSilent) as error:
            self._refused(f"{host}: it said nothing that is understood here {error}".rstrip())
        else:
            with self._changed:
                answer = self._why_not(comer) or Answer(life=self.life, terms=dict(self._terms))
                wire.write(answer.model_dump_json().encode())
                if not answer.refused:
                    who = f"{comer} ({host})"
                    link = Link(wire, who, self._silence_s)
                    self._taken(comer, link)
                    self._links[comer.node, comer.rank] = link
                    self._changed.notify_all()
                    return who, link
            self._refused(f"{host}: {comer}: {answer.refused}")
        return None

    def _why_not(self, comer: Comer) -> Answer | None:
        """What somebody is refused with, who may not come in."""
        settings = self._settings
        if comer.rank is not None and comer.life != self.life:
            return Answer(refused=f"{comer} belongs to an earlier life of this worker, which is over")
        if differs := difference(self._terms, comer.terms, "node 0", f"node {comer.node}"):
            return Answer(refused=differs[:REFUSAL_CHARACTERS_MAX], differs=True)
        if comer.node >= settings.nnodes:
            return Answer(refused=f"there are {settings.nnodes} nodes, counted from 0, and no {comer}", differs=True)
        if comer.rank is not None and comer.rank not in ranks_of(settings, comer.node):
            return Answer(refused=f"there is no {comer}", differs=True)
        if (comer.node, comer.rank) in self._links:
            peer = self._links[comer.node, comer.rank].peer
            return Answer(refused=f"{peer} is here already; each node has a --node-rank of its own")
        return None

    def _refused(self, text: str) -> None:
        if self._told.is_new(text):
            _log.warning("a connection to --dist-init-addr was refused, from %s", text)


def ranks_of(settings: WorkerSettings, node: int) -> range:
    return range(node * settings.ranks_per_node, (node + 1) * settings.ranks_per_node)


def listen_when_named(address: Address, stopping: StopRequests) -> socket.socket:
    """Where the name of this machine is known only some time after it has started, that is waited for. Raises
    UnavailableError, StoppedEarly."""
    outage = Outage(TOLD_AFTER_S, TOLD_AGAIN_S)
    while True:
        try:
            # Resolved apart: `create_server` tells a name that is not known as any other failure.
            family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server((where[0], where[1]), family=family, backlog=HANDSHAKES_MAX)
        except socket.gaierror as error:
            reason = error.strerror or str(error)
        except OSError as error:
            raise UnavailableError(
                f"--dist-init-addr: cannot listen on {address}: {error.strerror or error}",
                hint="it names an address of node 0 and a port that nothing else has there",
            ) from error
        if outage.lasts_s(time.monotonic(), reason) is not None:
            _log.info("waiting for the name %s to be known: %s", address.host, reason)
        if stopping.asked.wait(LOOK_S):
            raise StoppedEarly(f"told to stop before the name {address.host} was known")
