"""Which role may open what, in one table. What is not in it is refused.

The roles were given when certificates were issued. A worker speaks under its own id alone, because whoever registers
under an id is sent the prompts that are meant for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from coppice.tls.identity import Identity, Role

_SCHEDULER = frozenset({Role.SCHEDULER})
_WORKER = frozenset({Role.WORKER})
_OPERATOR = frozenset({Role.OPERATOR})
_ALL = frozenset(Role)

# Kind of session: who may open it, who serves it.
SESSIONS: Mapping[str, tuple[frozenset[Role], Role]] = {
    "index": (_SCHEDULER, Role.CACHE),
    "workers": (_WORKER, Role.CACHE),
    "steps": (_SCHEDULER, Role.WORKER),
    "doors": (_SCHEDULER, Role.SCHEDULER),  # front doors at the planners of another scheduler
}
NAMED_SESSIONS = frozenset({"workers"})  # opened under the name of the certificate only

_INDEX = "/coppice_rpc.v1.PrefixIndex/"
_ADMIN = "/coppice_rpc.v1.PrefixIndexAdmin/"
_WORKERS = "/coppice_rpc.v1.Worker/"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"

RPCS: Mapping[str, frozenset[Role]] = {
    f"{_INDEX}OpenSession": _SCHEDULER,
    f"{_INDEX}RenewSession": _SCHEDULER,
    f"{_INDEX}CloseSession": _SCHEDULER,
    f"{_INDEX}ListWorkers": _SCHEDULER | _OPERATOR,
    f"{_INDEX}Match": _SCHEDULER,
    f"{_INDEX}MatchBatch": _SCHEDULER,
    f"{_INDEX}Acquire": _SCHEDULER,
    f"{_INDEX}Extend": _SCHEDULER,
    f"{_INDEX}Publish": _SCHEDULER,
    f"{_INDEX}Release": _SCHEDULER,
    f"{_INDEX}Retain": _SCHEDULER,
    f"{_INDEX}Stats": _SCHEDULER | _OPERATOR,
    f"{_ADMIN}DumpTree": _OPERATOR,
    f"{_ADMIN}Explain": _OPERATOR,
    f"{_ADMIN}Audit": _OPERATOR,
    f"{_ADMIN}Invalidate": _OPERATOR,
    f"{_ADMIN}Pin": _OPERATOR,
    f"{_ADMIN}Unpin": _OPERATOR,
    f"{_ADMIN}ListPins": _OPERATOR,
    f"{_ADMIN}Watch": _OPERATOR,
    f"{_WORKERS}Drain": _OPERATOR,
    f"{_WORKERS}Undrain": _OPERATOR,
    f"{_WORKERS}Stats": _OPERATOR,
    f"{_REFLECTION}ServerReflectionInfo": _OPERATOR,
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
}

REST_OF_ALL = frozenset({"/healthz", "/readyz", "/metrics"})  # of every service; an operator may have the rest


def why_not_session(peer: Identity, kind: str, name: str) -> str:
    """Why `peer` may not open a session of this kind under this name; empty when it may."""
    openers, _ = SESSIONS.get(kind, (frozenset[Role](), None))
    if peer.role not in openers:
        return f"{peer} may not open sessions of the kind {kind!r}; {_may(openers)}"
    if kind in NAMED_SESSIONS and peer.name != name:
        return f"{peer} may not speak as {kind.removesuffix('s')} {name[:80]!r}; its certificate is for {peer.name!r}"
    return ""


def why_not_server(peer: Identity, kind: str, name: str) -> str:
    """Why `peer` may not serve sessions of this kind; empty when it may. `name`: that it must have, empty for any."""
    role = SESSIONS[kind][1]
    if peer.role is not role or (name and peer.name != name):
        return f"{peer} answers there in place of {Identity(role, name or '...')}"
    return ""


def why_not_rpc(peer: Identity, method: str) -> str:
    """Why `peer` may not call `/PACKAGE.SERVICE/METHOD`; empty when it may."""
    callers = RPCS.get(method, frozenset[Role]())
    return "" if peer.role in callers else f"{peer} may not call {method}; {_may(callers)}"


def why_not_rest(peer: Identity, path: str) -> str:
    """Why `peer` may not ask the admin REST for this path; empty when it may."""
    if path in REST_OF_ALL or peer.role in _OPERATOR:
        return ""
    return f"{peer} may not ask for this; {_may(_OPERATOR)}"


def _may(roles: frozenset[Role]) -> str:
    return f"the role {' or '.join(sorted(roles))} may" if roles else "nobody may"
