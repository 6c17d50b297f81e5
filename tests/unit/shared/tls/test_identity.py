"""Identities and the table of rights: nobody is who no certificate names, and what is not in the table is refused."""

from __future__ import annotations

import pytest

from coppice.edge import codec
from coppice.tls.identity import NoIdentity, Role, identity_of, make_identity, parse_identity
from coppice.tls.rights import (
    NAMED_SESSIONS,
    RPCS,
    SESSIONS,
    why_not_rest,
    why_not_rpc,
    why_not_server,
    why_not_session,
)
from coppice_rpc.v1 import cache_admin_pb2, cache_pb2, scheduler_pb2, worker_pb2

INWARD = (cache_pb2, cache_admin_pb2, worker_pb2)
WORKER = make_identity("worker", "w0")
OTHERS = {role: make_identity(role, "other") for role in Role}


@pytest.mark.parametrize("text", ["coppice://worker/w0", "coppice://operator/a.b-c_d"])
def test_an_identity_reads_as_it_prints(text: str) -> None:
    assert str(parse_identity(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "worker/w0", "coppice://worker", "coppice://worker/", "coppice://root/w0", "coppice://worker/a/b",
     "coppice://worker/-a", "coppice://worker/a b", "coppice://worker/" + "a" * 129, "https://worker/w0"],
)  # fmt: skip
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(NoIdentity):
        parse_identity(text)


@pytest.mark.parametrize(
    "names",
    [(), (("DNS", "coppice://worker/w0"),), (("URI", "coppice://worker/a"), ("URI", "coppice://cache/b")),
     (("URI", "spiffe://worker/w0"),)],
)  # fmt: skip
def test_a_certificate_has_one_identity(names: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(NoIdentity):
        identity_of({"subjectAltName": names})


def test_other_names_beside_the_identity_do_not_matter() -> None:
    names = (("DNS", "worker.example"), ("URI", "spiffe://x/y"), ("URI", "coppice://worker/w0"))
    assert identity_of({"subjectAltName": names}) == WORKER


def test_every_kind_of_session_is_in_the_table() -> None:
    edges = [edge for edge in vars(codec).values() if isinstance(edge, codec.Edge)]
    assert {edge.kind for edge in edges} | {"doors"} == set(SESSIONS), "front doors have no session"


@pytest.mark.parametrize("kind", SESSIONS)
def test_only_the_named_roles_open_a_session(kind: str) -> None:
    openers, server = SESSIONS[kind]
    for role, peer in OTHERS.items():
        assert bool(why_not_session(peer, kind, peer.name)) == (role not in openers)
        assert bool(why_not_server(peer, kind, "")) == (role is not server)


def test_a_worker_registers_under_its_own_name() -> None:
    assert "workers" in NAMED_SESSIONS
    assert not why_not_session(WORKER, "workers", "w0")
    assert "its certificate is for 'w0'" in why_not_session(WORKER, "workers", "w1")


def test_a_worker_that_is_asked_for_by_name_must_have_it() -> None:
    assert not why_not_server(WORKER, "steps", "w0")
    assert "in place of coppice://worker/w1" in why_not_server(WORKER, "steps", "w1")


def test_an_unknown_kind_of_session_is_refused() -> None:
    assert all(why_not_session(peer, "news", peer.name) for peer in OTHERS.values())


def test_every_rpc_of_inward_services_is_in_the_table() -> None:
    services = [service for module in INWARD for service in module.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    ours = {method for method in RPCS if method.startswith("/coppice_rpc.")}
    assert methods == ours
    public = [service.full_name for service in scheduler_pb2.DESCRIPTOR.services_by_name.values()]
    assert not [method for method in RPCS if method.split("/")[1] in public], "tenants have keys, not certificates"


@pytest.mark.parametrize("method", RPCS)
def test_only_the_named_roles_call(method: str) -> None:
    for role, peer in OTHERS.items():
        assert bool(why_not_rpc(peer, method)) == (role not in RPCS[method])


def test_an_unknown_rpc_is_refused() -> None:
    assert all(why_not_rpc(peer, "/coppice_rpc.v1.Worker/Format") for peer in OTHERS.values())


def test_operators_have_the_admin_rest_and_others_its_health() -> None:
    for role, peer in OTHERS.items():
        assert not why_not_rest(peer, "/readyz")
        assert bool(why_not_rest(peer, "/v1/stats")) == (role is not Role.OPERATOR)
