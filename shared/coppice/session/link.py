"""One session between two processes that survives its connections. Pure: frames in, frames out, no clock, no socket.

    outbox   ... | 4 | 5 | 6 | 7 |        retained until the peer acknowledges
                  ^acked+1    ^sent on this connection

A body is posted once and delivered exactly once, in order, as long as both ends live. After a reconnect the ends
exchange the highest number that they received and resend what lies above. When the server restarted, or forgot the
session, the handshake says `fresh`: both directions start at 1 and the applications reconcile their sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic

from coppice.session.frames import (
    KEY_BYTES,
    BodyT,
    Data,
    Frame,
    Heartbeat,
    Hello,
    Reject,
    RejectCode,
    Welcome,
)
from coppice.session.versions import SPOKEN, Versions, no_common_version

OUTBOX_MAX = 65_536
_LOWER = (1 << 32) - 1

Vouch = Callable[[bytes, int, int], bytes]  # for a client's key, the incarnation of its session, its epoch


def _no_voucher(key: bytes, incarnation: int, epoch: int) -> bytes:
    return b""


class LinkBroken(Exception):
    """The peer broke the protocol on this connection (a gap, an impossible acknowledgement): close and reconnect."""


class LinkOverflow(Exception):
    """More bodies wait than a session may hold: the peer has been away for too long, end the session."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The handshake succeeded."""

    fresh: bool
    epoch: int
    server_epoch: int
    version: int  # of the protocol, that both ends speak


class _Flow(Generic[BodyT]):
    """Numbers of both directions of one session."""

    __slots__ = ("acked", "connection", "outbox", "outbox_max", "posted", "received", "sent")

    def __init__(self, outbox_max: int) -> None:
        self.outbox: deque[BodyT] = deque()  # bodies acked+1 .. posted
        self.outbox_max = outbox_max
        self.posted = 0
        self.acked = 0
        self.sent = 0
        self.received = 0
        self.connection = 0

    def reset(self) -> None:
        self.outbox.clear()
        self.posted = self.acked = self.sent = self.received = 0

    def post(self, body: BodyT) -> None:
        if len(self.outbox) >= self.outbox_max:
            raise LinkOverflow(f"{len(self.outbox)} messages wait for an acknowledgement")
        self.outbox.append(body)
        self.posted += 1

    def acknowledge(self, ack: int) -> None:
        if ack > self.posted:
            raise LinkBroken(f"acknowledged {ack}, but only {self.posted} were sent")
        while self.acked < ack:
            self.outbox.popleft()
            self.acked += 1

    def rewind(self, peer_received: int) -> None:
        """Start a new connection: everything that the peer has not received is to be sent again."""
        if peer_received < self.acked:
            raise LinkBroken(f"peer received {peer_received}, but acknowledged {self.acked} before")
        self.acknowledge(peer_received)
        self.sent = self.acked

    def outgoing(self) -> list[Data[BodyT]]:
        frames = [
            Data(self.connection, self.sent + 1 + index, self.received, self.outbox[self.sent - self.acked + index])
            for index in range(self.posted - self.sent)
        ]
        self.sent = self.posted
        return frames

    def take(self, frame: Data[BodyT] | Heartbeat) -> list[BodyT]:
        if frame.connection != self.connection:
            return []
        self.acknowledge(frame.ack)
        if isinstance(frame, Heartbeat) or frame.number <= self.received:
            return []
        if frame.number != self.received + 1:
            raise LinkBroken(f"message {frame.number} after {self.received}")
        self.received = frame.number
        return [frame.body]


class ClientLink(Generic[BodyT]):
    """The end that connects. `connect()` opens a connection generation; everything older is ignored from then on."""

    def __init__(self, key: bytes, name: str, *, outbox_max: int = OUTBOX_MAX, speaks: Versions = SPOKEN) -> None:
        assert len(key) == KEY_BYTES
        self._speaks = speaks
        self.version = speaks.lowest  # that the server of the last handshake speaks, too
        self._key = key
        self._name = name
        self._flow: _Flow[BodyT] = _Flow(outbox_max)
        self._incarnation = 0
        self.epoch = 0
        self.voucher = b""  # for both; bytes to this end
        self.is_attached = False

    @property
    def connection(self) -> int:
        return self._flow.connection

    @property
    def is_idle(self) -> bool:
        """Nothing posted is unacknowledged."""
        return not self._flow.outbox

    @property
    def key(self) -> bytes:
        return self._key

    @property
    def incarnation(self) -> int:
        """Of the session that it was attached to last; 0: none."""
        return self._incarnation

    def renew(self, key: bytes) -> None:
        """Give the session up, with everything that waits in it: the next handshake opens another one."""
        assert len(key) == KEY_BYTES
        self._key = key
        self._incarnation = 0
        self._flow.reset()
        self._flow.connection += 1  # a Welcome that is still on its way belongs to the session that was given up
        self.is_attached = False

    def connect(self) -> Hello:
        """Abandon the current connection and open the next one."""
        self._flow.connection += 1
        self.is_attached = False
        return Hello(
            key=self._key,
            connection=self._flow.connection,
            incarnation=self._incarnation,
            received=self._flow.received,
            epoch=self.epoch,
            name=self._name,
            version=self._speaks.lowest,
            voucher=self.voucher,
            version_max=self._speaks.highest,
        )

    def receive(self, frame: Frame[BodyT]) -> Attached | Reject | list[BodyT]:
        """Handle one frame. Frames of older connections have no effect. Raises LinkBroken."""
        if isinstance(frame, Welcome):
            return self._welcomed(frame)
        if isinstance(frame, Reject):
            return frame
        if isinstance(frame, Hello):
            raise LinkBroken("a server sent Hello")
        return self._flow.take(frame) if self.is_attached else []

    def _welcomed(self, frame: Welcome) -> Attached | Reject | list[BodyT]:
        if frame.connection != self._flow.connection or self.is_attached:
            return []
        if frame.version not in self._speaks:
            theirs = Versions(frame.version, frame.version)
            return Reject(RejectCode.VERSION, no_common_version(self._name, self._speaks, theirs))
        if frame.fresh:
            self._flow.reset()
        elif frame.incarnation != self._incarnation:
            raise LinkBroken("resumed a session of another incarnation")
        self._flow.rewind(frame.received)
        self._incarnation = frame.incarnation
        self.epoch = frame.epoch
        self.voucher = frame.voucher or self.voucher
        self.version = frame.version
        self.is_attached = True
        return Attached(frame.fresh, frame.epoch, frame.server_epoch, frame.version)

    def post(self, body: BodyT) -> None:
        """Queue one body. It is lost only if the next handshake is fresh. Raises LinkOverflow, then not queued."""
        self._flow.post(body)

    def outgoing(self) -> list[Data[BodyT]]:
        """Frames to write on the current connection now."""
        return self._flow.outgoing() if self.is_attached else []

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._flow.connection, self._flow.received)


class ServerLink(Generic[BodyT]):
    """The accepting end of one session."""

    def __init__(self, key: bytes, name: str, epoch: int, *, incarnation: int, outbox_max: int = OUTBOX_MAX) -> None:
        self.key = key
        self.name = name
        self.epoch = epoch
        self.incarnation = incarnation
        self.version = 0  # that both ends speak; set by each handshake
        self.is_ended = False  # set by whoever forgets the session while a connection still serves it
        self._flow: _Flow[BodyT] = _Flow(outbox_max)

    @property
    def connection(self) -> int:
        return self._flow.connection

    @property
    def has_received(self) -> bool:
        return self._flow.received > 0

    def open(self, connection: int, peer_received: int) -> None:
        self._flow.connection = connection
        self._flow.rewind(peer_received)

    def receive(self, frame: Frame[BodyT]) -> list[BodyT]:
        """Bodies that arrived for the first time. Frames of older connections have no effect. Raises LinkBroken."""
        if not isinstance(frame, Data | Heartbeat):
            raise LinkBroken(f"a client sent {type(frame).__name__} after the handshake")
        return self._flow.take(frame)

    @property
    def received(self) -> int:
        return self._flow.received

    def post(self, body: BodyT) -> None:
        self._flow.post(body)

    def outgoing(self) -> list[Data[BodyT]]:
        return self._flow.outgoing()

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._flow.connection, self._flow.received)


@dataclass(frozen=True, slots=True)
class Accepted(Generic[BodyT]):
    """A connection was accepted. `is_new`: the server had no such session (its application attaches it now)."""

    link: ServerLink[BodyT]
    welcome: Welcome
    is_new: bool


class ServerLinks(Generic[BodyT]):
    """All sessions of one incarnation of a server.

    `incarnation` is never 0 and differs after every restart; `server_epoch` is told to clients. Each session gets an
    incarnation of its own, derived from it: a client that was forgotten and whose next Welcome got lost names the old
    session, not the one that was opened for it meanwhile, and must not resume that one with the old numbers.

        63          32 31                            0
        | as given    | digest of all + nth session  |      an incarnation of a session
    """

    def __init__(
        self, incarnation: int, server_epoch: int, *, outbox_max: int = OUTBOX_MAX, vouch: Vouch = _no_voucher
    ) -> None:
        assert incarnation != 0
        self._upper = incarnation & ~_LOWER
        named = blake2b(incarnation.to_bytes(8, "little"), digest_size=4, person=b"coppice.session")
        self._tag = int.from_bytes(named.digest(), "little")
        self._server_epoch = server_epoch
        self._vouch = vouch
        self._outbox_max = outbox_max
        self._num_opened = 0
        self._links: dict[bytes, ServerLink[BodyT]] = {}

    def accept(
        self, hello: Hello, attach: Callable[[Hello], int | Reject], speaks: Versions = SPOKEN
    ) -> Accepted[BodyT] | Reject:
        """Recognise or open the session of `hello`.

        `attach` is asked for the epoch of a session that is not known here; it may refuse.
        """
        refused = self.refusal(hello, speaks)
        if refused is not None:
            return refused
        link = self._links.get(hello.key)
        is_new = link is None
        if link is None:
            epoch = attach(hello)
            if isinstance(epoch, Reject):
                return epoch
            link = self._links[hello.key] = ServerLink(
                hello.key, hello.name, epoch, incarnation=self._next_incarnation(), outbox_max=self._outbox_max
            )
        link.version = speaks.common(hello.versions) or 0
        return self._welcome(link, hello, is_new)

    def refusal(self, hello: Hello, speaks: Versions = SPOKEN) -> Reject | None:
        """Why `hello` cannot be accepted, whatever the application says."""
        if speaks.common(hello.versions) is None:
            return Reject(RejectCode.VERSION, no_common_version(hello.name, hello.versions, speaks))
        if len(hello.key) != KEY_BYTES or hello.connection < 1:
            return Reject(RejectCode.INVALID, f"a session key has {KEY_BYTES} bytes and connections count from 1")
        link = self._links.get(hello.key)
        if link is not None and hello.name != link.name:
            return Reject(RejectCode.INVALID, "the session of this key has another name")
        if link is not None and hello.connection <= link.connection:
            return Reject(RejectCode.STALE_CONNECTION, f"connection {hello.connection} <= {link.connection}")
        return None

    def _next_incarnation(self) -> int:
        self._num_opened += 1
        return self._upper | (self._tag + self._num_opened) & _LOWER

    def issued(self, incarnation: int) -> bool:
        """Whether a session here has or had this incarnation."""
        opened = (incarnation - self._tag) & _LOWER
        return incarnation & ~_LOWER == self._upper and 1 <= opened <= self._num_opened

    def _welcome(self, link: ServerLink[BodyT], hello: Hello, is_new: bool) -> Accepted[BodyT] | Reject:
        # A client that never saw our first Welcome still names another session: nothing was exchanged yet, so this
        # one is fresh for it while the application here has it already.
        fresh = is_new or hello.incarnation != link.incarnation
        if fresh and link.has_received:
            return Reject(RejectCode.INVALID, "the session is known here under another incarnation")
        try:
            link.open(hello.connection, 0 if fresh else hello.received)
        except LinkBroken as broken:
            return Reject(RejectCode.INVALID, str(broken))
        welcome = Welcome(
            connection=hello.connection,
            incarnation=link.incarnation,
            epoch=link.epoch,
            server_epoch=self._server_epoch,
            received=link.received,
            fresh=fresh,
            version=link.version,
            voucher=self._vouch(link.key, link.incarnation, link.epoch),
        )
        return Accepted(link, welcome, is_new)

    def knows(self, key: bytes) -> bool:
        return key in self._links

    def forget(self, link: ServerLink[BodyT]) -> None:
        """End a session: its next Hello opens a fresh one."""
        if self._links.get(link.key) is link:
            del self._links[link.key]

    def __len__(self) -> int:
        return len(self._links)
