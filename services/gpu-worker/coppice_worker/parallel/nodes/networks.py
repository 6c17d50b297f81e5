"""By which address, and on which network, ranks of several machines reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256


def interface_of(host: str) -> str:
    """The network interface of this machine with this IPv4 address; empty where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(f"{_NAME_BYTES}s", name.encode()[:15]))
                if socket.inet_ntoa(raw[20:24]) == host:
                    return name
    return ""
