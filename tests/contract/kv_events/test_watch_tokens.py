"""Whose prompts leave the cache service through `Watch`: nobody's, unless operator and caller both name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from coppice.edge.grpc_server import CHANNEL_OPTIONS, GrpcServer
from coppice.ids import DomainId
from coppice_cache.edge.api.admin_grpc import PrefixIndexAdminServicer
from coppice_cache.edge.events.token_rule import TokenRule
from coppice_cache.edge.events.watching import Watchers
from coppice_cache.edge.service.event_hub import EventHub
from coppice_rpc.v1 import cache_admin_pb2 as pb
from coppice_rpc.v1 import cache_admin_pb2_grpc
from tests.fakes.cache.cache_ends import Cache
from tests.fakes.cache.index_trees import FakeTrees

A, S = DomainId("a"), DomainId("strict")


class Service:
    """What answers `Watch`, on trees of the domains "a", "b" and "strict"."""

    def __init__(self, rule: TokenRule) -> None:
        self.hub = EventHub(7)
        self.trees = FakeTrees(self.hub, num_blocks=32)
        self.watchers = Watchers(self.hub, self.trees, rule, still_s=0.05)
        self.watchers.start()
        servicer = PrefixIndexAdminServicer(self.watchers, None)  # type: ignore[arg-type]  # only Watch is called
        self._server = GrpcServer("127.0.0.1:0", (), servicer.add_to, "watch")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._server.port}", options=CHANNEL_OPTIONS)
        self._stub = cache_admin_pb2_grpc.PrefixIndexAdminStub(self._channel)
        for domain in ("a", "b", "strict"):
            self.trees.store(self.trees.place("w0", domain, "m", (1, 2)))

    def watch(self, *domains: str, with_tokens: bool = False, after: int = 0) -> Iterator[pb.WatchResponse]:
        request = pb.WatchRequest(domains=domains, with_tokens=with_tokens)
        if after:
            request.resume_stream, request.resume_sequence = self.hub.position.stream, after
        call: Iterator[pb.WatchResponse] = self._stub.Watch(request, timeout=30)
        return call

    def refusal(self, *domains: str) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            next(self.watch(*domains, with_tokens=True))
        error: grpc.RpcError = caught.value
        return error.code(), error.details()  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._channel.close()
        self.hub.close()
        self._server.stop(1.0)
        self.watchers.stop()


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for service in made:
        service.stop()


def made(services: list[Service], rule: TokenRule) -> Service:
    services.append(Service(rule))
    return services[-1]


def snapshot(messages: Iterator[pb.WatchResponse]) -> tuple[list[pb.BlocksStored], int]:
    stored = []
    for message in messages:
        if message.HasField("snapshot_end"):
            return stored, message.snapshot_end.num_blocks
        if message.HasField("stored"):
            stored.append(message.stored)
    raise AssertionError("the stream ended")


def test_tokens_are_refused_where_the_operator_did_not_allow_them(services: list[Service]) -> None:
    code, details = made(services, TokenRule()).refusal("a")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--kv-events-tokens" in details


def test_who_wants_tokens_names_domains(services: list[Service]) -> None:
    code, details = made(services, TokenRule(is_on=True)).refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "domains" in details


def test_tokens_of_a_strict_domain_are_given_to_nobody(services: list[Service]) -> None:
    service = made(services, TokenRule(is_on=True, strict=frozenset({S})))
    code, details = service.refusal("a", "strict")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "strict: its tokens are given to nobody" in details


def test_tokens_of_a_domain_that_is_not_published_are_refused(services: list[Service]) -> None:
    code, details = made(services, TokenRule(is_on=True, published=frozenset({A}))).refusal("b")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--kv-events-domains" in details


def test_a_call_ends_whose_domain_becomes_strict(services: list[Service]) -> None:
    service = made(services, TokenRule(is_on=True))
    open_call, of_another = service.watch("a", with_tokens=True), service.watch("b", with_tokens=True)
    snapshot(open_call)
    snapshot(of_another)
    service.watchers.set_rule(TokenRule(is_on=True, strict=frozenset({A})))
    with pytest.raises(grpc.RpcError):
        for _ in open_call:
            pass
    assert service.refusal("a")[0] is grpc.StatusCode.PERMISSION_DENIED
    assert next(of_another).stream == service.hub.position.stream


def test_a_changed_tenants_file_changes_whose_tokens_are_given(keep: Callable[[Cache], Cache], tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    one = f"tenants:\n  - {{id: a, api_key_sha256: '{'0' * 64}'}}\n"
    path.write_text(one)
    cache = keep(Cache(tenants=str(path), kv_events_tokens=True))
    request = pb.WatchRequest(domains=["tenant/b"], with_tokens=True)
    with grpc.insecure_channel(f"127.0.0.1:{cache.admin_port}") as channel:
        watch = cache_admin_pb2_grpc.PrefixIndexAdminStub(channel).Watch
        open_call = watch(request, timeout=30)
        next(open_call)
        path.write_text(
            f"{one}  - {{id: b, api_key_sha256: '{'1' * 64}', mode: strict, guarantee_share: 0.1, max_share: 0.1}}\n"
        )
        cache.process.look_at_tenants(always=True)
        with pytest.raises(grpc.RpcError):
            for _ in open_call:
                pass
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(request, timeout=30))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]


def test_a_watcher_hears_of_the_domains_that_it_named_alone(services: list[Service]) -> None:
    service = made(services, TokenRule(is_on=True, strict=frozenset({S})))
    stored, num_blocks = snapshot(service.watch("a", with_tokens=True))
    assert {one.domain for one in stored} == {"a"}
    assert num_blocks == sum(len(one.handles) // 8 for one in stored) == 2
    assert all(one.tokens for one in stored)


def test_a_watcher_of_one_domain_can_resume_after_changes_in_others(services: list[Service]) -> None:
    service = made(services, TokenRule())
    open_call = service.watch("a")
    snapshot(open_call)  # from now on changes are numbered
    service.trees.store(service.trees.place("w0", "a", "m", (1, 1)))
    before = next(message for message in open_call if message.HasField("stored")).sequence
    service.trees.store(service.trees.place("w0", "b", "m", (2,)))
    first = next(service.watch("a", after=before))
    assert first.WhichOneof("change") is None
    assert first.sequence == service.hub.position.sequence
    service.trees.store(service.trees.place("w0", "a", "m", (2,)))
    following = next(message for message in service.watch("a", after=first.sequence) if message.HasField("stored"))
    assert following.stored.domain == "a"


def test_without_tokens_all_domains_are_followed_as_before(services: list[Service]) -> None:
    stored, _ = snapshot(made(services, TokenRule()).watch())
    assert {one.domain for one in stored} == {"a", "b", "strict"}
    assert not any(one.tokens for one in stored)
