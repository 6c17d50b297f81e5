"""TLS over bytes, apart from any socket: what came from the network goes in, what must go there comes out.

An `ssl` object may be used by one thread at a time, but a connection is read by one thread while others write. So it
works on memory here, under its owner's lock, and never waits for the network with that lock held.

    feed(ciphertext) -> read() -> plaintext          sealed(plaintext) -> ciphertext
"""

from __future__ import annotations

import ssl
from typing import Any

_RECORD_BYTES = 1 << 14  # of plaintext, at most


class TlsChannel:
    """One end of one connection. One thread at a time."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._record = memoryview(bytearray(_RECORD_BYTES))
        self.is_open = False  # hands were shaken
        self.heard_farewell = False  # nothing more comes
        self._is_broken = False

    def shake_hands(self) -> bool:
        """Go on with the handshake. True: it is done. Raises ssl.SSLError; then `outgoing` tells the peer why."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            self._is_broken = True
            raise
        self.is_open = True
        return True

    @property
    def certificate(self) -> dict[str, Any] | None:
        """Of the peer, after the handshake."""
        return self._tls.getpeercert()

    @property
    def context(self) -> ssl.SSLContext:
        return self._tls.context

    def feed(self, data: bytes) -> None:
        if not self._is_broken:  # nobody would ever read it
            self._incoming.write(data)

    def read(self) -> bytes:
        """All that can be read of what was fed. After a farewell nothing more comes. Raises ssl.SSLError."""
        parts: list[bytes] = []
        try:
            # Asked once more when there is nothing, it would raise, which costs more than opening a short record.
            while self._incoming.pending or self._tls.pending():
                size = int(self._tls.read(_RECORD_BYTES, self._record))
                if not size:
                    self.heard_farewell = True
                    break
                parts.append(bytes(self._record[:size]))
        except ssl.SSLZeroReturnError:
            self.heard_farewell = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._is_broken = True
            if not parts:
                raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sealed(self, data: bytes | bytearray | memoryview[Any]) -> bytes:
        """As it goes to the network. Raises ssl.SSLError."""
        with memoryview(data) as rest:
            sent = 0
            while sent < len(rest):
                sent += self._tls.write(rest[sent:])
        return self._outgoing.read()

    def say_farewell(self) -> None:
        """What was said until now is all, and the peer can tell that nobody cut it off."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # the peer's own farewell has not come, or the connection is broken already

    def outgoing(self) -> bytes:
        """What TLS itself has to say: of the handshake, answers, alerts."""
        return self._outgoing.read()


def tls_reason(error: ssl.SSLError) -> str:
    """What went wrong between two ends, for a person."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is refused: {error.verify_message}"
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if reason in ("wrong version number", "http request", "record layer failure", "packet length too long"):
        return f"the other side does not speak TLS ({reason})"
    if " alert " in f" {reason} ":
        return f"the other side refuses our certificate, or TLS as it is here ({reason})"
    return f"TLS failed: {reason}"
