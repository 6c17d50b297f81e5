"""Addresses: free ones for internal edges, and early errors for those that a user chose."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from collections.abc import Iterator

from coppice.addresses import Address
from coppice.errors import UnavailableError, UsageError

LOOPBACK = "127.0.0.1"
_INTERNAL_PORTS = (15_000, 32_000)
_PORTS_PER_PROCESS = 32
# Where this process looks next. Who was given a port may not listen on it yet, so none is given out again before all
# the others were.
_steps = itertools.count()


def free_addresses(count: int, host: str = LOOPBACK) -> list[Address]:
    """`count` different free ports. All are held until the last is found, so that none is handed out twice.

    They lie below the range from which systems give ports to outgoing connections: one of those could take a port
    between now and the start of the service that is to listen there, or while it is started again.
    """
    held: list[socket.socket] = []
    ports = _candidates()
    try:
        while len(held) < count:
            candidate = socket.socket(Address(host, 0).family)
            try:
                candidate.bind((host, next(ports)))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
        return [Address(host, bound.getsockname()[1]) for bound in held]
    finally:
        for bound in held:
            bound.close()


def _candidates() -> Iterator[int]:
    """Every internal port, beginning where no other process that looks for ports at this moment begins."""
    low, high = _INTERNAL_PORTS
    start = os.getpid() * _PORTS_PER_PROCESS
    return (low + (start + step) % (high - low) for step in _steps)


def check_free(address: Address, flag: str) -> None:
    """Raise while it is still cheap when nobody can listen on `address`; `flag` is what a user changes."""
    with socket.socket(address.family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UnavailableError(
                    f"port {address.port} on {address.host} is in use", hint=f"choose another with {flag}"
                ) from None
            if error.errno == errno.EACCES:
                raise UnavailableError(
                    f"port {address.port} needs privileges", hint=f"choose one above 1023 with {flag}"
                ) from None
            raise UsageError(
                f"cannot listen on {address}: {error.strerror}", hint="is --host an address of this machine?"
            ) from None
