"""Channels between ranks. One that is closed, or breaks, means that the rank at its other end is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coppice_worker.parallel.errors import RankLost


class Channel(Protocol):
    """Bytes both ways, as of a socket: between processes of one machine it is one; see also `nodes.link.Stream`."""

    def sendall(self, data: bytes, /) -> None:
        """Raises OSError when the other end is closed."""

    def recv(self, size: int, /) -> bytes:
        """Waits for at least one byte; none when the other end is closed. Raises OSError."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """The same; how many bytes came. Raises OSError."""

    def close(self) -> None: ...


def send_all(channels: Mapping[int, Channel], message: bytes) -> None:
    """To all of them, by rank. Raises RankLost."""
    for rank, channel in channels.items():
        try:
            channel.sendall(message)
        except OSError as error:
            raise RankLost(rank, "has ended") from error


def await_byte(rank: int, channel: Channel) -> None:
    """What a rank says with one byte. Raises RankLost."""
    try:
        came = channel.recv(1)
    except OSError as error:
        raise RankLost(rank, "has ended") from error
    if not came:
        raise RankLost(rank, "has ended")
