"""The cache service on its own: its unary forms over real gRPC, a worker that holds no model, no scheduler anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice_rpc.v1 import cache_pb2 as pb
from tests.fakes.cache.cache_ends import BLOCK, CALL_S, NAMESPACE, Cache, FakeWorker, UnaryClient, lease, prompt, tokens
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
Code = grpc.StatusCode


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def worker(cache: Cache, keep: Keep) -> FakeWorker:
    started = keep(FakeWorker(cache)).wait_registered()
    assert isinstance(started, FakeWorker)
    return started


@pytest.fixture
def client(cache: Cache, worker: FakeWorker, keep: Keep) -> UnaryClient:
    opened = keep(UnaryClient(cache))
    assert isinstance(opened, UnaryClient)
    return opened


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_prefix_is_computed_once(cache: Cache, client: UnaryClient) -> None:
    text = prompt(18)
    cold = client.acquire(1, text).grant
    assert (cold.worker_id, cold.num_cached_tokens, cold.shared) == ("w", 0, b"")
    assert len(cold.owned) == 8 * 5
    published = client.publish(1, text[: 16 * 4]).published
    assert published.num_published_blocks == 4
    assert published.handles == cold.owned[: 8 * 4]
    assert client.match(text) == 16
    assert client.match(text[: 16 * 4]) == 12, "the last token is always computed"
    warm = client.acquire(2, text).grant
    assert (warm.num_cached_tokens, warm.shared, warm.shared_seals) == (16, published.handles, published.seals)
    assert len(warm.owned) == 8
    more = client.extend(2, 26).extended
    assert (more.first_block, len(more.owned)) == (5, 16)
    assert client.release(1).WhichOneof("answer") == client.release(2).WhichOneof("answer") == "released"
    stats = client.stats()
    assert (stats.leases, stats.cached_blocks, stats.leased_blocks, stats.free_blocks) == (0, 4, 0, 12)
    cache.audit()


def test_each_op_is_idempotent(cache: Cache, client: UnaryClient) -> None:
    text = prompt(12)
    assert client.acquire(1, text) == client.acquire(1, text)
    assert client.publish(1, text[: 8 * 4]) == client.publish(1, text[: 8 * 4])
    assert client.extend(1, 20) == client.extend(1, 20)
    assert client.extend(1, 20).WhichOneof("answer") == "extended"
    assert client.stats().leased_blocks == 3, "5 blocks, of which 2 are published"
    assert client.stats().leases == 1
    assert client.release(1) == client.release(1)
    assert client.stats().leases == 0
    cache.audit()


def test_two_domains_share_nothing(cache: Cache, client: UnaryClient) -> None:
    text = prompt(17)
    client.acquire(1, text, "a")
    client.publish(1, text[: 16 * 4])
    other = client.acquire(2, text, "b").grant
    assert (other.num_cached_tokens, other.shared) == (0, b"")
    assert client.match(text, "b") == 0
    sealed = client.publish(2, text[: 16 * 4]).published
    own = client.acquire(3, text, "a").grant
    assert own.num_cached_tokens == 16
    assert not set(_handles(own.shared)) & set(_handles(sealed.handles))
    assert sealed.seals != own.shared_seals, "a seal names its domain"
    cache.audit()


def _handles(packed: bytes) -> list[bytes]:
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def test_another_namespace_is_another_tree(client: UnaryClient) -> None:
    text = prompt(9)
    client.acquire(1, text)
    client.publish(1, text[: 8 * 4])
    request = pb.MatchRequest(domain="a", namespace=b"model-b", tokens=text, worker_id="w")
    assert client.stub.Match(request, timeout=CALL_S).num_cached_tokens == 0


def test_hints_for_several_prompts_at_once(client: UnaryClient) -> None:
    text = prompt(17)
    client.acquire(1, text, "a")
    client.publish(1, text[: 16 * 4])
    asked = [("a", text), ("a", text[: 10 * 4]), ("b", text), ("a", prompt(4, 900))]
    queries = [pb.MatchQuery(domain=domain, namespace=NAMESPACE, tokens=data) for domain, data in asked]
    found = client.stub.MatchBatch(pb.MatchQueries(queries=queries), timeout=CALL_S)
    hints = [(list(hint.worker_ids), list(hint.num_cached_tokens)) for hint in found.hints]
    assert hints == [(["w"], [16]), (["w"], [8]), ([], []), ([], [])]
    cut = pb.MatchQueries(queries=[pb.MatchQuery(domain="a", namespace=NAMESPACE, tokens=b"123")])
    code, text_of = refusal(lambda: client.stub.MatchBatch(cut, timeout=CALL_S))
    assert code is Code.INVALID_ARGUMENT
    assert "packed u32" in text_of


def test_a_second_computation_of_one_prefix_can_wait_for_the_first(client: UnaryClient) -> None:
    text = prompt(60)
    candidates = [pb.Candidate(worker_id="w")]

    def ask(number: int) -> pb.Answer:
        op = pb.Acquire(
            lease_id=lease(number),
            domain="a",
            namespace=NAMESPACE,
            tokens=text,
            reserve_tokens=60,
            candidates=candidates,
            may_wait=True,
        )
        return client.stub.Acquire(pb.AcquireRequest(session_epoch=client.epoch, acquire=op), timeout=CALL_S)

    assert ask(1).WhichOneof("answer") == "grant"
    assert ask(2).pending.num_tokens == 56
    client.publish(1, text)
    assert ask(2).grant.num_cached_tokens == 56


BAD_ACQUIRES: dict[str, tuple[dict[str, Any], str]] = {
    "half a token": ({"tokens": b"\1\0\0\0\2"}, "5"),
    "a short lease id": ({"lease_id": b"abc"}, "lease_id has 3 bytes; it must have 16"),
    "no lease id": ({"lease_id": b""}, "lease_id has 0 bytes"),
    "less reserved than given": ({"reserve_tokens": 3}, "reserve"),
    "no domain": ({"domain": ""}, "domain"),
    "no tokens": ({"tokens": b"", "reserve_tokens": 0}, "token"),
    "an absurd reservation": ({"reserve_tokens": 2**40}, "1048576"),
}


@pytest.mark.parametrize(("changes", "named"), BAD_ACQUIRES.values(), ids=BAD_ACQUIRES)
def test_a_wrong_acquire_changes_nothing(
    cache: Cache, client: UnaryClient, changes: dict[str, Any], named: str
) -> None:
    client.acquire(1, prompt(9))
    before = cache.stats()
    code, text = refusal(lambda: client.acquire(2, prompt(9), **changes))
    assert code is Code.INVALID_ARGUMENT
    assert named in text
    assert cache.stats() == before


def test_other_wrong_input_changes_nothing(cache: Cache, client: UnaryClient) -> None:
    text = prompt(9)
    client.acquire(1, text)
    before = cache.stats()
    wrong = [
        lambda: client.publish(1, text[:7]),
        lambda: client.publish(1, text[: 6 * 4]),
        lambda: client.publish(1, text[: 8 * 4], first_block=1),
        lambda: client.publish(1, prompt(64)),
        lambda: client.extend(1, 2**40),
        lambda: client.match(b"\1\2\3"),
        lambda: client.match(text, domain=""),
        lambda: client.acquire(1, text, domain="b"),
    ]
    for call in wrong:
        assert refusal(call)[0] is Code.INVALID_ARGUMENT
    assert client.acquire(2, text, candidates=[]).no_capacity.reason == pb.NoCapacity.NO_WORKER
    assert client.extend(77, 40).WhichOneof("answer") == "gone"
    assert client.publish(77, text[: 8 * 4]).WhichOneof("answer") == "gone"
    assert client.release(77).WhichOneof("answer") == "released"
    assert refusal(lambda: client.match(text, worker_id="nobody")) == (
        Code.NOT_FOUND,
        "no worker 'nobody' is registered",
    )
    assert cache.stats() == before
    cache.audit()


def test_a_call_without_a_deadline_is_refused(cache: Cache, client: UnaryClient) -> None:
    before = cache.stats()
    stub, wire = client.stub, pb.Acquire(lease_id=lease(1), domain="a", tokens=prompt(4), reserve_tokens=4)
    calls = [
        lambda: stub.OpenSession(pb.OpenSessionRequest()),
        lambda: stub.RenewSession(pb.RenewSessionRequest(session_epoch=client.epoch)),
        lambda: stub.CloseSession(pb.CloseSessionRequest(session_epoch=client.epoch)),
        lambda: stub.ListWorkers(pb.ListWorkersRequest()),
        lambda: stub.Match(pb.MatchRequest(domain="a", worker_id="w")),
        lambda: stub.Acquire(pb.AcquireRequest(session_epoch=client.epoch, acquire=wire)),
        lambda: stub.Extend(pb.ExtendRequest(session_epoch=client.epoch)),
        lambda: stub.Publish(pb.PublishRequest(session_epoch=client.epoch)),
        lambda: stub.Release(pb.ReleaseRequest(session_epoch=client.epoch)),
        lambda: stub.Stats(pb.StatsRequest()),
    ]
    for call in calls:
        code, text = refusal(call)
        assert code is Code.INVALID_ARGUMENT
        assert "deadline" in text
    assert cache.stats() == before


def test_an_unknown_session_holds_nothing(cache: Cache, client: UnaryClient) -> None:
    before = cache.stats()
    client.epoch = 12345
    code, text = refusal(lambda: client.acquire(1, prompt(9)))
    assert code is Code.NOT_FOUND
    assert "12345" in text
    assert client.extend(1, 40).WhichOneof("answer") == "gone"
    assert client.release(1).WhichOneof("answer") == "released"
    assert not client.renew()
    client.stub.CloseSession(pb.CloseSessionRequest(session_epoch=client.epoch), timeout=CALL_S)
    assert cache.stats() == before


def test_a_lease_belongs_to_its_session(cache: Cache, client: UnaryClient, keep: Keep) -> None:
    client.acquire(1, prompt(9))
    thief = keep(UnaryClient(cache))
    assert thief.epoch != client.epoch
    assert thief.extend(1, 20).WhichOneof("answer") == "gone"
    assert thief.release(1).WhichOneof("answer") == "released"
    assert client.stats().leases == 1
    assert client.extend(1, 20).WhichOneof("answer") == "extended"


def test_silence_ends_a_session_and_its_blocks_wait_for_the_fence(keep: Keep) -> None:
    cache = keep(Cache(session_ttl_ms=1_000))
    worker = keep(FakeWorker(cache, acknowledges=False)).wait_registered()
    client = keep(UnaryClient(cache))
    epochs = tuple(cache.process._service.clients._by_epoch)
    assert client.opened.ttl_ms == 1_000
    client.acquire(1, prompt(9))
    fence = worker.wait_fence()
    assert fence.scheduler_epochs == epochs
    assert not client.renew()
    assert client.extend(1, 20).WhichOneof("answer") == "gone"
    assert refusal(lambda: client.acquire(2, prompt(9)))[0] is Code.NOT_FOUND
    held = client.stats()
    assert (held.leases, held.sessions, held.draining_blocks, held.free_blocks) == (0, 0, 3, 13)
    worker.acknowledge(fence)
    wait_for(lambda: client.stats().free_blocks == 16, "the fence frees the blocks")
    cache.audit()


def test_calls_keep_a_session_alive(keep: Keep) -> None:
    cache = keep(Cache(session_ttl_ms=600))
    keep(FakeWorker(cache)).wait_registered()
    quiet, busy = keep(UnaryClient(cache)), keep(UnaryClient(cache))
    quiet.acquire(1, prompt(9))
    busy.acquire(2, prompt(9))
    wait_for(lambda: busy.renew() and cache.stats()["leases"] != 2, "the quiet one expires")
    assert busy.renew()
    assert busy.extend(2, 20).WhichOneof("answer") == "extended"
    assert not quiet.renew()


def test_a_release_through_a_fence_names_the_lease(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache, acknowledges=False)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9))
    assert client.release(1, through_fence=True).WhichOneof("answer") == "released"
    fence = worker.wait_fence()
    assert fence.lease_ids == (lease(1),)
    assert client.stats().draining_blocks == 3
    assert client.acquire(1, prompt(9)).WhichOneof("answer") == "gone", "the id drains"
    worker.acknowledge(fence)
    worker.acknowledge(fence)  # doubled: without effect
    wait_for(lambda: client.stats().free_blocks == 16, "the fence frees the blocks")
    cache.audit()


def test_closing_a_session_gives_everything_back(cache: Cache, client: UnaryClient, worker: FakeWorker) -> None:
    client.acquire(1, prompt(9))
    epochs = tuple(cache.process._service.clients._by_epoch)
    client.stub.CloseSession(pb.CloseSessionRequest(session_epoch=client.epoch), timeout=CALL_S)
    assert worker.wait_fence().scheduler_epochs == epochs
    wait_for(lambda: client.stats().free_blocks == 16, "the fence frees the blocks")
    assert client.stats().sessions == 0


def test_a_silent_worker_is_dead(keep: Keep) -> None:
    cache = keep(Cache(worker_ttl_ms=300))
    worker = keep(FakeWorker(cache)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9))
    client.publish(1, prompt(8))
    worker.stop()
    wait_for(lambda: not client.stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers, "the worker goes")
    assert client.extend(1, 20).WhichOneof("answer") == "gone"
    assert client.acquire(2, prompt(9)).no_capacity.reason == pb.NoCapacity.NO_WORKER
    assert cache.stats()["leases"] == 0
    again = keep(FakeWorker(cache)).wait_registered()
    assert again.epoch > worker.epoch
    assert client.acquire(3, prompt(9)).grant.num_cached_tokens == 0


def test_the_newest_process_of_a_worker_id_wins(cache: Cache, worker: FakeWorker, keep: Keep) -> None:
    newer = keep(FakeWorker(cache)).wait_registered()
    assert newer.epoch > worker.epoch
    wait_for(lambda: worker.rejected, "the older one is told")
    assert "newer process" in worker.rejected[-1].message
    assert len(newer.registered) == 1
    assert not newer.rejected
    listed = keep(UnaryClient(cache)).stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S).workers
    assert [(info.worker_id, info.worker_epoch) for info in listed] == [("w", newer.epoch)]


def test_workers_are_listed(cache: Cache, client: UnaryClient, worker: FakeWorker) -> None:
    listed = client.stub.ListWorkers(pb.ListWorkersRequest(), timeout=CALL_S)
    assert listed.cache_epoch == client.opened.cache_epoch
    (info,) = listed.workers
    assert (info.worker_id, info.address, info.num_blocks, info.block_size) == ("w", "127.0.0.1:9", 16, BLOCK)
    assert (info.namespace, info.model, info.open) == (NAMESPACE, "model-a", True)


TENANTS = f"""
tenants:
  - {{id: small, api_key_sha256: "{"0" * 64}", max_share: 0.25}}
  - {{id: large, api_key_sha256: "{"1" * 64}"}}
"""


def test_a_domain_at_its_maximum_is_refused_while_others_are_served(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    cache = keep(Cache(tenants=str(tmp_path / "tenants.yaml")))
    keep(FakeWorker(cache)).wait_registered()
    client = keep(UnaryClient(cache))
    assert client.acquire(1, prompt(16), "tenant/small").WhichOneof("answer") == "grant"
    full = client.acquire(2, prompt(4), "tenant/small").no_capacity
    assert full.reason == pb.NoCapacity.DOMAIN_MAXIMUM
    assert full.retry_after_ms > 0
    assert client.acquire(3, prompt(17), "tenant/small").no_capacity.reason == pb.NoCapacity.NEVER_FITS
    assert client.acquire(4, prompt(16), "tenant/large").WhichOneof("answer") == "grant"
    nobody = client.acquire(5, prompt(4), "tenant/nobody").no_capacity
    assert (nobody.reason, nobody.retry_after_ms) == (pb.NoCapacity.DOMAIN_UNKNOWN, 500), "it may be listed soon"


def test_the_fields_worked_example_comes_out_of_the_allocator(keep: Keep) -> None:
    """50, 200, 30 and 150 tokens over blocks of 16 would hold 4, 13, 2 and 10; blocks of 4 here."""
    cache = keep(Cache())
    keep(FakeWorker(cache, num_blocks=128)).wait_registered()
    client = keep(UnaryClient(cache))
    held = [
        len(client.acquire(number, prompt(length, first=1000 * number)).grant.owned) // 8
        for number, length in enumerate((50, 200, 30, 150))
    ]
    assert held == [13, 50, 8, 38]


def test_health_and_reflection(cache: Cache, client: UnaryClient) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "coppice_rpc.v1.PrefixIndex"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    listed = next(stub.ServerReflectionInfo(iter([request]), timeout=CALL_S)).list_services_response
    assert "coppice_rpc.v1.PrefixIndex" in {service.name for service in listed.service}


def test_tokens_are_bytes_and_any_value_is_a_token(client: UnaryClient) -> None:
    text = tokens(0, 2**32 - 1, 0, 7, 5)
    client.acquire(1, text)
    client.publish(1, text[:16])
    assert client.match(text) == 4
