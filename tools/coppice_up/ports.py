"""Addresses: usual ones and free ones for internal edges, and early errors for those that a user chose."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from coppice.addresses import Address
from coppice.errors import UnavailableError, UsageError

LOOPBACK = "127.0.0.1"
USUAL_GRPC, USUAL_CACHE_GRPC, USUAL_CACHE_ADMIN_GRPC = 7070, 7071, 7073  # as the services have them by themselves
USUAL_CACHE_ADMIN, USUAL_OPERATOR = 8071, 8075  # where `coppice cache` and `coppice requests` look
USUAL_WORKER_GRPC, USUAL_WORKER_HTTP = 7080, 8080  # of the first worker; the next ones have those above
_INTERNAL_PORTS = (15_000, 32_000)
_PORTS_PER_PROCESS = 32
_LOCK_NAME = "coppice-{user}-port-{port}"  # in the folder for temporary files
# Where this process looks next. Who was given a port may not listen on it yet, so none is given out again before all
# the others were.
_steps = itertools.count()


class PortClaims:
    """Ports that one stack of this machine has claimed, so that another one that starts at the same moment does not
    take them before its services listen, nor while one of them is started again.

    A claim is a lock on a file, which ends with the process at the latest. Only stacks look at it; whether somebody
    else listens is asked of the socket.
    """

    def __init__(self) -> None:
        self._locked: dict[int, IO[bytes]] = {}

    def claim(self, port: int) -> bool:
        """False where another stack has it."""
        if port in self._locked:
            return True
        path = Path(tempfile.gettempdir()) / _LOCK_NAME.format(user=os.getuid(), port=port)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False  # somebody else has put something there
        lock = os.fdopen(descriptor, "rb+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._locked[port] = lock
        return True

    def give_back(self, port: int) -> None:
        self._locked.pop(port).close()

    def close(self) -> None:
        for port in list(self._locked):
            self.give_back(port)


def claim_named(address: Address, flag: str, claims: PortClaims) -> None:
    """For what a user has asked for. Raises UsageError and UnavailableError; `flag` is what a user changes."""
    check_free(address, flag)
    if not claims.claim(address.port):
        raise _in_use(address, flag)


def claim_usual(address: Address, claims: PortClaims) -> bool:
    """Whether it is ours now; False where somebody else has it."""
    if not claims.claim(address.port):
        return False
    with contextlib.suppress(UsageError, UnavailableError):
        check_free(address, "")
        return True
    claims.give_back(address.port)
    return False


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
                raise _in_use(address, flag) from None
            if error.errno == errno.EACCES:
                raise UnavailableError(
                    f"port {address.port} needs privileges", hint=f"choose one above 1023 with {flag}"
                ) from None
            raise UsageError(
                f"cannot listen on {address}: {error.strerror}", hint="is --host an address of this machine?"
            ) from None


def _in_use(address: Address, flag: str) -> UnavailableError:
    return UnavailableError(f"port {address.port} on {address.host} is in use", hint=f"choose another with {flag}")
