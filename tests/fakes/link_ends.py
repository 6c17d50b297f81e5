"""Both ends of a session over real connections, with handlers that write down what they hear.

The worker's edge is used because its bodies are the shortest: plans go up, results come down, numbered by `step`.
"""

from __future__ import annotations

import threading
from typing import Any

from coppice.addresses import Address, SessionAddress, parse_session_address
from coppice.edge import codec, session_socket
from coppice.edge.link_client import LinkClient
from coppice.edge.link_server import HELLO_S, LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.edge.wire import Wire, WireClosed, WireSilent, introduction
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Hello, Reject
from coppice.session.link import Attached, ServerLink, ServerLinks
from coppice.tls.credentials import Credentials
from tests.fakes.waiting import WAIT_S, wait_for

Where = int | str  # a port of this machine, or the address of sessions


def address_of(where: Where) -> SessionAddress:
    return Address("127.0.0.1", where) if isinstance(where, int) else parse_session_address(where)


def shake_hands(client: Wire, client_tls: Credentials, server: Wire, server_tls: Credentials) -> None:
    """Both ends of one connection, each on a thread of its own."""
    accepting = threading.Thread(target=lambda: server.start_tls(server_tls.channel(is_server=True), WAIT_S))
    accepting.start()
    client.start_tls(client_tls.channel(is_server=False), WAIT_S)
    accepting.join(WAIT_S)
    assert server.peer == client_tls.identity


class ServerEnd:
    """A LinkServer on a real socket. `refusal` is answered to new sessions; `on_body` may raise."""

    def __init__(
        self,
        links: ServerLinks[Any] | None,
        where: Where = 0,
        hello_s: float = HELLO_S,
        *,
        tls: Credentials | None = None,
        edge: codec.Edge = codec.STEPS,
    ) -> None:
        self.bodies: list[tuple[int, int]] = []  # (session epoch, step)
        self.connected: list[tuple[ServerLink[Any], bool]] = []
        self.heard = 0
        self.opened: list[Hello] = []
        self.refusal: Reject | None = None
        self.on_body: Any = lambda step: None
        self._epochs = 0
        self.server = LinkServer(links, edge, self, hello_s=hello_s)
        self.listener = SessionListener(address_of(where), tls)
        address = self.listener.address
        self.where = str(address)
        self.port = address.port if isinstance(address, Address) else 0
        self.listener.start((self.server,))

    def session_opening(self, hello: Hello) -> int | Reject:
        self.opened.append(hello)
        self._epochs += 1
        return self.refusal if self.refusal is not None else self._epochs

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        self.connected.append((link, is_new))

    def session_heard(self, link: ServerLink[Any]) -> None:
        self.heard += 1

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        self.on_body(body.step)
        self.bodies.append((link.epoch, body.step))

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.bodies]

    def newest(self) -> ServerLink[Any]:
        return wait_for(lambda: self.connected, "a session connects")[-1][0]

    def post(self, step: int) -> bool:
        return self.server.post(self.newest(), StepResult(step))

    def stop(self) -> None:
        self.listener.close()
        self.server.close()


class ClientEnd:
    """A LinkClient that writes down what it hears, with the attachment that it was heard under."""

    def __init__(
        self,
        where: Where,
        outbox_max: int = 65_536,
        *,
        tls: Credentials | None = None,
        certified: str = "",
        edge: codec.Edge = codec.STEPS,
        name: str = "client",
    ) -> None:
        self.attached: list[Attached] = []
        self.bodies: list[tuple[int, int]] = []  # (attachment, step)
        self.lost: list[str] = []
        self.rejected: list[Reject] = []
        self.num_refused = 0  # attempts that found nobody at the address
        self.attachment = 0
        self.link = LinkClient(
            edge,
            str(address_of(where)),
            self,
            name,
            "server",
            outbox_max=outbox_max,
            tls=tls,
            certified=certified,
            nobody_listens=self.nobody_listens,
        )
        self.link.start()

    def link_attached(self, attached: Attached, attachment: int) -> None:
        self.attachment = attachment
        self.attached.append(attached)

    def link_body(self, body: Any, attachment: int) -> None:
        self.bodies.append((attachment, body.step))

    def link_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def link_rejected(self, reject: Reject) -> None:
        self.rejected.append(reject)

    def nobody_listens(self) -> None:
        self.num_refused += 1

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.bodies]

    def wait_attached(self, times: int = 1) -> None:
        wait_for(lambda: len(self.attached) >= times, f"{times} attachments; rejected: {self.rejected}")

    def post(self, step: int) -> None:
        self.link.post(StepPlan(step), self.attachment)

    def stop(self) -> None:
        self.link.stop()


class RawStream:
    """One connection, written and read by hand."""

    def __init__(self, where: Where) -> None:
        self._wire = Wire(session_socket.connect(address_of(where), WAIT_S))
        self._wire.write(introduction("steps"))
        self._is_introduced = False

    def write(self, frame: Any) -> None:
        self.write_bytes(codec.STEPS.from_client.encode(frame))

    def write_bytes(self, message: bytes) -> None:
        self._wire.write(message)

    def read(self) -> Any:
        """The next frame; None once the connection has ended."""
        try:
            if not self._is_introduced:
                self._is_introduced = True
                self._wire.next(WAIT_S)
            return codec.STEPS.from_server.decode(self._wire.next(WAIT_S))
        except WireClosed:
            return None

    @property
    def has_more(self) -> bool:
        """Whether something came that was not read."""
        try:
            self._wire.next(0.2)
        except WireSilent:
            return False
        return True

    def wait_end(self) -> None:
        while self.read() is not None:
            pass

    def close(self) -> None:
        self._wire.close()
