"""One connection between rank 0 and a rank, or a node: several things side by side, and a beat.

    | kind u8 | bytes |        a message of `coppice.edge.wire`, in TLS between machines

A link is over when it is closed, when nothing was heard for `silence_s` though each side beats, or when one side bids
farewell. Only a farewell is an end in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from coppice.edge.wire import MESSAGE_BYTES_MAX, Wire, WireClosed
from coppice_worker.parallel.errors import LinkLost

BEAT_S = 1.0
SILENCE_S = 15.0  # a process that loads a model may be slow to speak; a machine that is off says nothing
PIECE_BYTES = 1 << 20
WAITING_BYTES_MAX = 2 * MESSAGE_BYTES_MAX  # that a rank was told and has not come to


class Kind(IntEnum):
    """What a message is."""

    BEAT = 0
    COMMANDS = 1  # bytes of `commands`, to a rank
    COPIES = 2  # and those for copies between the tiers; each is answered by one byte
    ASK = 3  # of the store
    ANSWER = 4
    LOADED = 5  # facts of a rank whose share is loaded
    STOP = 6  # a node was told to stop
    CUT = 7  # and told so again
    FAREWELL = 8


class Stream:
    """A `Channel` over a link. `feed` and `end` are called by the link's thread."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._parts: deque[memoryview] = deque()
        self._num_waiting = 0  # bytes
        self._is_over = False
        self._changed = threading.Condition()

    def sendall(self, data: bytes, /) -> None:
        if self._is_over:
            raise BrokenPipeError("the link is over")
        self._send(data)

    def recv(self, size: int, /) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview, /) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._parts or self._is_over)
            if not self._parts:
                return 0
            part = self._parts.popleft()
            count = min(len(part), len(buffer))
            buffer[:count] = part[:count]
            if count < len(part):
                self._parts.appendleft(part[count:])
            self._num_waiting -= count
            return count

    def close(self) -> None:
        self.end()

    def feed(self, data: bytes) -> None:
        """Raises LinkLost when too much waits already."""
        with self._changed:
            if self._num_waiting + len(data) > WAITING_BYTES_MAX:
                raise LinkLost(f"{self._num_waiting} bytes wait here to be read")
            if data:
                self._parts.append(memoryview(data))
                self._num_waiting += len(data)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Link:
    """`run` belongs to one thread; `send` and `bid_farewell` may be called from any."""

    def __init__(self, wire: Wire, peer: str, silence_s: float = SILENCE_S) -> None:
        """`wire`: hands were shaken and both sides introduced. `peer`: who is there, for a person."""
        wire.trust()
        self.peer = peer
        self._wire = wire
        self._silence_s = silence_s
        self._is_leaving = False
        self.commands = Stream(lambda data: self.send(Kind.COMMANDS, data))
        self.copies = Stream(lambda data: self.send(Kind.COPIES, data))
        self._handlers: dict[Kind, Callable[[bytes], None]] = {
            Kind.COMMANDS: self.commands.feed,
            Kind.COPIES: self.copies.feed,
            Kind.BEAT: lambda _: None,
        }

    def on(self, kind: Kind, handle: Callable[[bytes], None]) -> None:
        """What to do with messages of a kind, on the link's thread; before `run`. It may wait for nothing."""
        self._handlers[kind] = handle

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """On a link that is over it has no effect: whoever runs it hears of that."""
        if len(data) <= PIECE_BYTES:
            self._wire.write(bytes([kind]) + data)
            return
        assert kind in (Kind.COMMANDS, Kind.COPIES), "only streams may be cut"
        self._wire.write(*(bytes([kind]) + data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)))

    def bid_farewell(self) -> None:
        """The worker ends in order."""
        self._is_leaving = True
        self.send(Kind.FAREWELL)

    def run(self) -> None:
        """Until the other side bids farewell, or is gone after ours. Raises LinkLost, which says how it was lost."""
        beaten_s = -BEAT_S
        try:
            while True:
                now_s = time.monotonic()
                if now_s - beaten_s >= BEAT_S:
                    beaten_s = now_s
                    self._wire.write(bytes([Kind.BEAT]))
                for message in self._wire.receive(BEAT_S):
                    if not self._take(bytes(message)):
                        return
                silent_s = time.monotonic() - self._wire.heard_s
                if silent_s > self._silence_s:
                    raise LinkLost(f"it said nothing for {silent_s:.0f} s")
        except WireClosed as error:
            if not self._is_leaving:
                raise LinkLost(f"the connection broke: {error}") from error
        finally:
            self.commands.end()
            self.copies.end()

    def close(self) -> None:
        """When nobody runs it any more, and what was said last may be read."""
        self._wire.finish()

    def abort(self) -> None:
        self._wire.abort()

    def _take(self, message: bytes) -> bool:
        """False: it was a farewell."""
        kind = message[0] if message else -1
        if kind == Kind.FAREWELL:
            return False
        handle = self._handlers.get(Kind(kind)) if kind in tuple(Kind) else None
        if handle is None:
            raise LinkLost(f"it sent a message of kind {kind}, which is none for here")
        try:
            handle(message[1:])
        except LinkLost:
            raise
        except Exception as error:  # a thread that ended with it would leave the link to nobody
            raise LinkLost(f"what it sent cannot be used: {error!r}") from error
        return True
