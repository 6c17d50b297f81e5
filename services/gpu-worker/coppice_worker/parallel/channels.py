"""Sockets between ranks. One that is closed, or breaks, means that the rank at its other end is lost."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from coppice_worker.parallel.errors import RankLost


def send_all(channels: Mapping[int, socket.socket], message: bytes) -> None:
    """To all of them, by rank. Raises RankLost."""
    for rank, channel in channels.items():
        try:
            channel.sendall(message)
        except OSError as error:
            raise RankLost(rank, "has ended") from error


def await_byte(rank: int, channel: socket.socket) -> None:
    """What a rank says with one byte. Raises RankLost."""
    try:
        came = channel.recv(1)
    except OSError as error:
        raise RankLost(rank, "has ended") from error
    if not came:
        raise RankLost(rank, "has ended")
