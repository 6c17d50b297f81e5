"""Sockets of sessions by their address: TCP, or a Unix socket for peers of the same user on the same machine.

A Unix socket is a file. Its folder belongs to this user and is closed to others (0700), so nobody else reaches the
socket or puts another one in its place; the file itself has mode 0600. The file of a process that was killed stays: the
next one removes it when nobody answers there. The folder is locked meanwhile, so that of two processes that find such a
file one listens, and the other one hears that the socket is in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coppice.addresses import PortInUse, SessionAddress, UnixAddress


def listen(address: SessionAddress) -> socket.socket:
    """Raises PortInUse."""
    try:
        if isinstance(address, UnixAddress):
            return _listen_on_file(Path(address.path))
        return socket.create_server((address.host, address.port), family=address.family)
    except OSError as error:
        raise PortInUse(f"cannot listen on {address} for sessions: {error.strerror or error}") from error


def connect(address: SessionAddress, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    if not isinstance(address, UnixAddress):
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address.path)
    except BaseException:
        connection.close()
        raise
    return connection


def _listen_on_file(path: Path) -> socket.socket:
    with _locked(path.parent):
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            path.chmod(0o600)  # nobody connects before `listen`
            listener.listen()
        except BaseException:
            listener.close()
            raise
        return listener


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError, also when others than this user may do something there."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise OSError(f"there is no folder {folder}; make it with mkdir -m 700") from None
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid():
            raise OSError(f"the folder {folder} belongs to another user")
        if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(state.st_mode)
            raise OSError(f"the folder {folder} is open to other users (mode {mode:o}); close it with chmod 700")
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """The socket of a process that is gone. Raises OSError when somebody listens there, or it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError("what is there is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # whoever is there and has no room for a connection is there, too
        answer = probe.connect_ex(str(path))
    if answer in (0, errno.EAGAIN):
        raise OSError("another process listens there")
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise OSError(answer, os.strerror(answer))
    path.unlink(missing_ok=True)
