"""Who a process is: one URI in its certificate, `coppice://ROLE/NAME`.

The DNS names beside it say nothing that counts here. gRPC clients cannot look at a URI before they speak, but compare
a name: `grpc_name` and `ANY_GRPC_NAME` are in certificates of ours for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SCHEME = "coppice://"
ANY_GRPC_NAME = "coppice.internal"  # DNS name in every certificate
NAME_CHARACTERS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


class Role(StrEnum):
    """What a process is in the stack. An operator is a person's tool; a monitor may have health and metrics alone."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    CACHE = "cache"
    OPERATOR = "operator"
    MONITOR = "monitor"


class NoIdentity(ValueError):
    """A certificate, or a text, that names nobody of ours."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Prints as its URI."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"


def make_identity(role: str, name: str) -> Identity:
    """Raises NoIdentity."""
    if role not in tuple(Role):
        raise NoIdentity(f"{role!r} is no role; there are {', '.join(Role)}")
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.match(name):
        raise NoIdentity(
            f"{name!r} is no name for a certificate: 1 to {NAME_CHARACTERS_MAX} letters, digits, dots, dashes and "
            "underscores, a letter or digit first"
        )
    return Identity(Role(role), name)


def parse_identity(uri: str) -> Identity:
    """Raises NoIdentity."""
    role, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or not slash:
        raise NoIdentity(f"{uri[:80]!r} is no identity; it must read {SCHEME}ROLE/NAME")
    return make_identity(role, name)


def identity_among(uris: list[str]) -> Identity:
    """The one identity among the URIs of a certificate. Raises NoIdentity."""
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        raise NoIdentity(f"the certificate has {len(ours)} URIs {SCHEME}ROLE/NAME; it must have one")
    return parse_identity(ours[0])


def identity_of(certificate: Mapping[str, Any] | None) -> Identity:
    """Of a peer, as `ssl` tells of its certificate. Raises NoIdentity."""
    names = (certificate or {}).get("subjectAltName", ())
    return identity_among([value for kind, value in names if kind == "URI"])


def grpc_name(role: Role) -> str:
    """DNS name in every certificate of this role."""
    return f"{role}.coppice.internal"
