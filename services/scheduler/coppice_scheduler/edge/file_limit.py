"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

import logging
import resource

_log = logging.getLogger("coppice.scheduler")
MAX_CONNECTIONS = 16_384  # of one front door
RESERVED_FILES = 512  # for everything that is no REST connection


def raise_file_limit() -> None:
    """As far as it goes without privileges; say so when that leaves less than a front door would take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if connections_within_limit() < MAX_CONNECTIONS:
        _log.warning(
            "at most %d open files are allowed: a front door takes %d connections at once instead of %d "
            "(raise the hard limit, such as with ulimit -Hn)",
            hard,
            connections_within_limit(),
            MAX_CONNECTIONS,
        )


def connections_within_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED_FILES))
