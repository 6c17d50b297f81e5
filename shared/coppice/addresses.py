"""Where services listen: HOST:PORT as people write it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.errors import UsageError


class PortInUse(Exception):
    """The address of a listener is taken."""


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
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)


def parse_address(text: str) -> Address:
    """`host:port` or `[v6]:port`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", hint="give HOST:PORT")
    return Address(host.strip("[]"), int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises UsageError when the name cannot be resolved."""
    try:
        found: Sequence[tuple[object, ...]] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}", hint="give an address of this machine") from None
    hosts = {str(entry[4][0]) for entry in found}  # type: ignore[index]
    return all(ipaddress.ip_address(name.split("%")[0]).is_loopback for name in hosts)
