"""Who comes to node 0, and what it answers: one message each, before anything else is read.

    comer:   {"protocol": "coppice-ranks/1", "node": 1, "rank": null, "life": "", "terms": {...}}
    node 0:  {"protocol": "coppice-ranks/1", "refused": "...", "differs": false, "life": "9f..", "terms": {...}}

First a node comes. It is told the name of this life of the worker, and its ranks say that name: one that was started in
an earlier life is refused. Between machines all of it is in TLS, whose certificates are of the role worker on both
sides.
"""

from __future__ import annotations

import time

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coppice.edge.wire import Wire, WireUntrusted
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Identity, Role
from coppice_worker.parallel.errors import NodeRefused, TermsDiffer
from coppice_worker.parallel.nodes.terms import difference

PROTOCOL = "coppice-ranks/1"
REFUSAL_CHARACTERS_MAX = 1024
HANDSHAKE_S = 10.0  # TLS and both messages


class Stranger(Exception):
    """Whoever it is, it speaks something else."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    protocol: str = Field(default=PROTOCOL, max_length=64)
    life: str = Field(default="", max_length=64)
    terms: dict[str, str] = Field(default={}, max_length=64)


class Comer(_Message):
    """`rank` None: the process of a node. Else a rank of it."""

    node: int = Field(ge=1, le=63)
    rank: int | None = Field(default=None, ge=1, le=63)

    def __str__(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} of node {self.node}"


class Answer(_Message):
    """`refused`: why not. `differs`: because of other terms, so that coming again is of no use."""

    refused: str = Field(default="", max_length=REFUSAL_CHARACTERS_MAX)
    differs: bool = False


def receive_comer(wire: Wire, tls: Credentials | None, timeout_s: float = HANDSHAKE_S) -> Comer:
    """At node 0. Raises WireClosed, WireUntrusted, WireSilent, Stranger."""
    ends_s = time.monotonic() + timeout_s
    if tls is not None:
        _check_role(wire.start_tls(tls.channel(is_server=True), timeout_s))
    message = wire.next(max(0.0, ends_s - time.monotonic()))
    try:
        comer = Comer.model_validate_json(message)
    except ValidationError as error:
        raise Stranger("it said nothing that a node of a worker says") from error
    if comer.protocol != PROTOCOL:
        raise Stranger(f"it speaks {comer.protocol!r}, not {PROTOCOL}: the nodes have different builds")
    return comer


def introduce(wire: Wire, comer: Comer, tls: Credentials | None, timeout_s: float = HANDSHAKE_S) -> str:
    """At another node: say who comes. Returns the name of the worker's life. Raises NodeRefused, TermsDiffer,
    WireClosed, WireSilent."""
    ends_s = time.monotonic() + timeout_s
    try:
        if tls is not None:
            _check_role(wire.start_tls(tls.channel(is_server=False), timeout_s))
        wire.write(comer.model_dump_json().encode())
        message = wire.next(max(0.0, ends_s - time.monotonic()))
    except WireUntrusted as error:
        raise NodeRefused(f"whoever answers there is not trusted: {error}") from error
    try:
        answer = Answer.model_validate_json(message)
    except ValidationError as error:
        raise NodeRefused("whoever answers there is no worker that waits for other nodes") from error
    if answer.refused:
        raise (TermsDiffer if answer.differs else NodeRefused)(answer.refused)
    if differs := difference(answer.terms, comer.terms, "node 0", f"node {comer.node}"):
        raise TermsDiffer(differs)
    return answer.life


def _check_role(peer: Identity) -> None:
    """Raises WireUntrusted."""
    if peer.role is not Role.WORKER:
        raise WireUntrusted(f"{peer} is no worker; ranks speak to workers alone")
