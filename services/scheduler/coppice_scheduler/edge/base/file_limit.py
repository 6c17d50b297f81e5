"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from coppice.edge.session_listener import allow_open_files

_log = logging.getLogger("coppice.scheduler")
BACKLOG = 4096  # REST connections that wait to be accepted
MAX_CONNECTIONS = 16_384  # of one front door
MAX_GRPC_CONNECTIONS = 2048  # each of many calls at once
GRPC_SHARE = 8  # one part of so many, where files are short
RESERVED_FILES = 512  # for everything that is no connection of a client


def raise_file_limit() -> None:
    """As far as it goes without privileges; say so when that leaves less than a front door would take."""
    hard = allow_open_files()
    allowed = connections_within_limit()
    if allowed.rest < MAX_CONNECTIONS:
        _log.warning(
            "at most %d open files are allowed: a front door takes %d REST connections at once instead of %d "
            "(raise the hard limit, such as with ulimit -Hn)",
            hard,
            allowed.rest,
            MAX_CONNECTIONS,
        )


@dataclass(frozen=True, slots=True)
class Connections:
    """That one front door takes at once."""

    rest: int
    grpc: int


def connections_within_limit() -> Connections:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Connections(MAX_CONNECTIONS, MAX_GRPC_CONNECTIONS)
    room = max(GRPC_SHARE, soft - RESERVED_FILES)
    grpc = min(MAX_GRPC_CONNECTIONS, room // GRPC_SHARE)
    return Connections(min(MAX_CONNECTIONS, room - grpc), grpc)
