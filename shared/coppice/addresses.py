"""Where services listen, as people write it: HOST:PORT, and for sessions also unix:/PATH."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.errors import UsageError

_UNIX = "unix:"
UNIX_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103  # `sun_path` without its end


class PortInUse(Exception):
    """Nobody can listen on the address of a listener; the text says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port; prints as `host:port`, with brackets where IPv6 needs them."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """Of a socket that listens there."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def reached(self) -> Address:
        """As a client on this machine reaches it."""
        named = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # nosec # nothing is bound here (B104)
        return Address(named, self.port)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """Absolute path of a Unix socket; prints as `unix:/path`. Raises UsageError on a path that no socket can have."""

    path: str

    def __post_init__(self) -> None:
        if not self.path.startswith("/") or "\0" in self.path:
            raise UsageError(f"{str(self)!r} names no absolute path", hint="give unix:/PATH")
        num_bytes = len(os.fsencode(self.path))
        if num_bytes > UNIX_PATH_BYTES_MAX:
            raise UsageError(
                f"{self}: the path has {num_bytes} bytes, that of a Unix socket at most {UNIX_PATH_BYTES_MAX}",
                hint="choose a folder with a shorter path",
            )

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


SessionAddress = Address | UnixAddress


def parse_address(text: str) -> Address:
    """`host:port` or `[v6]:port`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", hint="give HOST:PORT")
    return Address(host.strip("[]"), int(port))


def parse_session_address(text: str) -> SessionAddress:
    """`unix:/path`, or as `parse_address`. Raises UsageError."""
    if text.startswith(_UNIX):
        return UnixAddress(text.removeprefix(_UNIX))
    try:
        return parse_address(text)
    except UsageError as error:
        raise UsageError(str(error), hint="give HOST:PORT or unix:/PATH") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises UsageError when the name cannot be resolved."""
    try:
        found: Sequence[tuple[object, ...]] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}", hint="give an address of this machine") from None
    hosts = {str(entry[4][0]) for entry in found}  # type: ignore[index]
    return all(ipaddress.ip_address(name.split("%")[0]).is_loopback for name in hosts)
