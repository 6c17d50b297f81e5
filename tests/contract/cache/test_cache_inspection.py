"""Looking into a real service: REST, gRPC and the command line."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from coppice.edge.grpc_server import CHANNEL_OPTIONS
from coppice.errors import UsageError, run_main
from coppice_cache.core.inspection.audit import Looked
from coppice_cache.edge.service.auditor import AuditRunning
from coppice_cli.app import app
from coppice_cli.cache.token_lists import parse_tokens
from coppice_rpc.v1 import cache_admin_pb2 as pb
from coppice_rpc.v1 import cache_admin_pb2_grpc
from coppice_up.ports import free_addresses
from tests.contract.cache.test_cache_admin import metric
from tests.fakes.cache.cache_ends import NAMESPACE, Cache, FakeWorker, UnaryClient, lease, prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
A, B = "tenant/a", "tenant/b"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache(audit_interval_s=0))
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def client(cache: Cache, keep: Keep) -> UnaryClient:
    """Two blocks in the tree of tenant/a, read by lease 7; lease 8 in tenant/b."""
    keep(FakeWorker(cache)).wait_registered()
    opened = keep(UnaryClient(cache))
    assert isinstance(opened, UnaryClient)
    opened.acquire(1, prompt(9), A)
    opened.publish(1, prompt(8))
    opened.release(1)
    opened.acquire(7, prompt(9), A)
    opened.acquire(8, prompt(9), B)
    return opened


def send(cache: Cache, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{cache.http_port}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


# ---- REST


def test_a_tree_in_pages(cache: Cache, client: UnaryClient) -> None:
    client.acquire(2, prompt(4) + prompt(5, first=90), A)
    client.publish(2, prompt(4) + prompt(4, first=90))
    status, first = cache.rest(f"/v1/domains/{A}/tree?limit=2&worker_id=w")
    assert (status, first["truncated"], first["moved"]) == (200, True, False)
    (root, upper) = first["trees"][0]["nodes"]
    assert (root["node"], upper["parent"], upper["num_children"]) == ("", "", 2)
    rest = cache.rest(f"/v1/domains/{A}/tree?page_token={first['next_page_token']}")[1]
    assert [node["parent"] for node in rest["trees"][0]["nodes"]] == [upper["node"]] * 2
    assert not rest["truncated"]


def test_wrong_pages_and_workers(cache: Cache, client: UnaryClient) -> None:
    status, body = cache.rest(f"/v1/domains/{A}/tree?page_token=zzz")
    assert (status, "page token" in body["error"]["message"]) == (400, True)
    status, body = cache.rest(f"/v1/domains/{A}/tree?worker_id=nobody")
    assert (status, body["error"]["code"]) == (404, "worker_not_found")


def test_an_explanation(cache: Cache, client: UnaryClient) -> None:
    status, body = send(cache, "POST", "/v1/explain", {"domain": A, "tokens": [1, 2, 3, 4, 5, 6, 9]})
    assert status == 200
    (found,) = body["workers"]
    assert (found["worker_id"], found["num_cached_tokens"], found["stopped_by"]) == ("w", 4, "end_of_prompt")
    assert found["lease_ids"] == [lease(7).hex()]
    assert len(found["path"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"domain": "nobody", "tokens": [1]}, 404, "nobody"),
        ({"domain": A, "tokens": []}, 400, "tokens"),
        ({"domain": A, "tokens": [-1]}, 400, "greater"),
        ({"domain": A, "tokens": [1 << 32]}, 400, "less"),
        ({"domain": A, "tokens": ["1"]}, 400, "integer"),
        ({"domain": A, "tokens": [True]}, 400, "integer"),
        ({"domain": A, "tokens": [1], "namespace": "xyz"}, 400, "namespace"),
        ({"domain": A, "tokens": [1], "tokenz": 1}, 400, "tokenz"),
        ({"tokens": [1]}, 400, "domain"),
    ],
)
def test_explanations_that_make_no_sense(
    cache: Cache, client: UnaryClient, body: dict[str, Any], status: int, word: str
) -> None:
    answered, found = send(cache, "POST", "/v1/explain", body)
    assert answered == status
    assert word in found["error"]["message"]


def test_invalidation_by_domain_prefix_and_everything(cache: Cache, client: UnaryClient) -> None:
    def cached(domain: str) -> int:
        found = send(cache, "POST", "/v1/explain", {"domain": domain, "tokens": list(range(1, 10))})
        return int(found[1]["workers"][0]["num_cached_tokens"])

    client.publish(8, prompt(8))
    assert (cached(A), cached(B)) == (8, 8)
    what = {"domain": A, "namespace": NAMESPACE.hex(), "tokens": list(range(1, 9))}
    assert send(cache, "POST", "/v1/invalidate", what) == (200, {"num_trees": 1})
    assert (cached(A), cached(B)) == (4, 8)
    assert send(cache, "POST", "/v1/invalidate", {"domain": A}) == (200, {"num_trees": 1})
    assert (cached(A), cached(B)) == (0, 8)
    assert send(cache, "POST", "/v1/invalidate", {"everything": True}) == (200, {"num_trees": 1})
    assert cached(B) == 0
    cache.audit()


def test_invalidations_that_make_no_sense(cache: Cache, client: UnaryClient) -> None:
    all_and_one = {"everything": True, "domain": A}
    for body in ({}, all_and_one, {"everything": "yes"}, {"everything": 1}, {"domain": A, "tokens": [1]}):
        assert send(cache, "POST", "/v1/invalidate", body)[0] == 400, body
    assert send(cache, "POST", "/v1/invalidate", {"domain": "no"})[0] == 404


def test_pins(cache: Cache, client: UnaryClient) -> None:
    pin = {"domain": A, "namespace": NAMESPACE.hex(), "tokens": list(range(1, 9))}
    assert send(cache, "PUT", "/v1/pins/the/system", pin) == (
        200,
        {"name": "the/system", "num_tokens": 8, "num_workers": 1},
    )
    (listed,) = cache.rest("/v1/pins")[1]["pins"]
    assert (listed["name"], listed["worker_id"], listed["num_tokens"]) == ("the/system", "w", 8)
    assert send(cache, "PUT", "/v1/pins/the/system", {**pin, "tokens": [5]})[0] == 400
    assert send(cache, "DELETE", "/v1/pins/the/system") == (200, {"name": "the/system", "was_pinned": True})
    assert send(cache, "DELETE", "/v1/pins/the/system")[0] == 404


def test_pages_of_other_origins_change_nothing(cache: Cache, client: UnaryClient) -> None:
    """A form can send these without asking; scripts are held back by the browser's question, which we never grant."""
    what = {"domain": A}
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {**JSON, "Origin": "http://evil.example"},
        {**JSON, "Origin": f"http://127.0.0.1:{cache.http_port}"},
    ):
        status, body = send(cache, "POST", "/v1/invalidate", what, headers)
        assert (status, body["error"]["code"]) == (403, "foreign_origin"), headers
    assert send(cache, "DELETE", "/v1/pins/x", None, {"Origin": "http://evil.example"})[0] == 403
    assert send(cache, "POST", "/v1/audit", {}, {**JSON, "Origin": "http://evil.example"})[0] == 403
    assert send(cache, "OPTIONS", "/v1/invalidate", None, {"Origin": "http://evil.example"})[0] == 405
    assert cache.stats()["cached_blocks"] == 2


# ---- audits


def break_it(cache: Cache) -> None:
    cache.process._service._locked.core.state.workers["w"].ledger.counts[1] += 1  # type: ignore[index]


def test_an_audit_says_what_it_looked_at(cache: Cache, client: UnaryClient) -> None:
    assert cache.rest("/v1/audit")[1] == {"running": None, "last": None}
    status, found = cache.rest("/v1/audit", "POST")
    assert (status, found["holds"], found["blocks"], found["nodes"], found["leases"]) == (200, True, 16, 1, 2)
    assert cache.rest("/v1/audit")[1]["last"] == found
    assert metric(cache, "coppice_cache_audits_total", result="holds") == 1
    assert metric(cache, "coppice_cache_audit_broken") == 0


def test_a_broken_invariant_degrades_and_ends_nothing(cache: Cache, client: UnaryClient) -> None:
    break_it(cache)
    assert cache.rest("/v1/audit", "POST")[0] == 500
    status, ready = cache.rest("/readyz")
    assert (status, ready["status"]) == (200, "degraded")
    assert "I1 broken" in ready["reasons"][0]
    assert metric(cache, "coppice_cache_audit_broken") == 1
    assert not cache.rest("/v1/audit")[1]["last"]["holds"]
    cache.process._service._locked.core.state.workers["w"].ledger.counts[1] -= 1  # type: ignore[index]
    cache.audit()
    assert cache.rest("/readyz")[1]["status"] == "ready"


def test_an_audit_that_fails_itself_is_a_finding(
    cache: Cache, client: UnaryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ledger: object) -> None:
        raise ZeroDivisionError("as a state may make it that is broken badly enough")

    monkeypatch.setattr("coppice_cache.core.inspection.check.check_counts", fail)
    status, found = cache.rest("/v1/audit", "POST")
    assert (status, found["holds"], found["invariant"]) == (500, False, "audit")
    assert "ZeroDivisionError" in found["evidence"]
    assert not cache.process.failures


def test_one_audit_at_a_time(cache: Cache, client: UnaryClient) -> None:
    auditor = cache.process._service.auditor
    auditor._pause_s = 0.05
    release = threading.Event()
    core = cache.process._service._locked.core
    audit = core.audit

    def waits(looked: Looked) -> Iterator[None]:
        while not release.is_set():
            yield

    core.audit = waits  # type: ignore[method-assign]
    first = threading.Thread(target=cache.rest, args=("/v1/audit", "POST"))
    first.start()
    wait_for(lambda: cache.rest("/v1/audit")[1]["running"] is not None, "the audit runs")
    status, body = cache.rest("/v1/audit", "POST")
    assert (status, body["error"]["code"]) == (409, "audit_running")
    with pytest.raises(AuditRunning):
        auditor.run()
    release.set()
    first.join()
    core.audit = audit  # type: ignore[method-assign]
    cache.audit()


def test_the_ticker_audits_now_and_then(keep: Keep) -> None:
    cache = keep(Cache(audit_interval_s=0.01))
    wait_for(lambda: cache.rest("/v1/audit")[1]["last"] is not None, "an audit that nobody asked for")
    assert cache.rest("/v1/audit")[1]["last"]["holds"]


# ---- gRPC


@pytest.fixture
def stub(cache: Cache, client: UnaryClient, keep: Keep) -> Any:
    channel = grpc.insecure_channel(f"127.0.0.1:{cache.admin_port}", options=CHANNEL_OPTIONS)
    channel.stop = channel.close  # type: ignore[attr-defined]
    keep(channel)
    return cache_admin_pb2_grpc.PrefixIndexAdminStub(channel)


def test_the_same_over_grpc(stub: Any) -> None:
    dump = stub.DumpTree(pb.DumpTreeRequest(domain=A, limit=1), timeout=60)
    assert (len(dump.nodes), dump.nodes[0].namespace, bool(dump.next_page_token)) == (1, NAMESPACE, True)
    rest = stub.DumpTree(pb.DumpTreeRequest(domain=A, page_token=dump.next_page_token), timeout=60)
    assert [(node.num_blocks, node.num_pins, node.depth) for node in rest.nodes] == [(2, 1, 1)]
    (found,) = stub.Explain(pb.ExplainRequest(domain=A, tokens=prompt(9)), timeout=60).workers
    assert (found.num_cached_tokens, found.stopped_by, list(found.lease_ids)) == (8, "end_of_prompt", [lease(7)])
    assert list(found.path) == [rest.nodes[0].node]
    audit = stub.Audit(pb.AuditRequest(), timeout=60)
    assert (audit.holds, audit.blocks, audit.nodes, audit.leases) == (True, 16, 1, 2)
    pinned = stub.Pin(pb.PinRequest(domain=A, namespace=NAMESPACE, tokens=prompt(8), name="p"), timeout=60)
    assert (pinned.num_tokens, pinned.num_workers) == (8, 1)
    (listed,) = stub.ListPins(pb.ListPinsRequest(), timeout=60).pins
    assert (listed.name, listed.worker_id, listed.num_tokens) == ("p", "w", 8)
    assert stub.Unpin(pb.UnpinRequest(name="p"), timeout=60).was_pinned
    assert not stub.Unpin(pb.UnpinRequest(name="p"), timeout=60).was_pinned
    assert stub.Invalidate(pb.InvalidateRequest(domain=A), timeout=60).num_trees == 1


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("DumpTree", pb.DumpTreeRequest(domain="nobody"), grpc.StatusCode.NOT_FOUND),
        ("DumpTree", pb.DumpTreeRequest(domain=A, page_token="zz"), grpc.StatusCode.INVALID_ARGUMENT),
        ("DumpTree", pb.DumpTreeRequest(domain=A, limit=1 << 30), grpc.StatusCode.INVALID_ARGUMENT),
        ("Explain", pb.ExplainRequest(domain=A, tokens=b"123"), grpc.StatusCode.INVALID_ARGUMENT),
        ("Invalidate", pb.InvalidateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        ("Pin", pb.PinRequest(domain=A, tokens=prompt(4)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_wrong_calls_over_grpc(stub: Any, method: str, request_: Any, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request_, timeout=60)
    assert caught.value.code() is code


def test_calls_without_a_deadline_are_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Audit(pb.AuditRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in str(caught.value.details())


# ---- the command line


def coppice(*words: object) -> int:
    """Exit code of `coppice cache ...`."""
    try:
        arguments = ["cache", *map(str, words)]
        return run_main("coppice", lambda: int(app(arguments, prog_name="coppice", standalone_mode=False) or 0))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def url(cache: Cache, client: UnaryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_ADMIN_URL", f"http://127.0.0.1:{cache.http_port}")


def test_commands_for_people(url: None, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("stats",), ("worker", "tenant/a", "hit share", "44.4%")),
        (("tree", A), ("tenant/a on w", "blocks 0-1", "pinned by 1")),
        (("explain", A, "--tokens", "1,2,3,4,9,9,9,9"), ("w: 4 of 8 tokens are cached", lease(7).hex())),
        (("audit",), ("All invariants hold: 16 blocks, 1 nodes and 2 leases",)),
        (("pin", "p", A, "--tokens", "1 2 3 4 5 6 7 8"), ("Pinned p: 8 of 8 tokens are held now on 1 worker.",)),
        (("pins",), ("tokens held", "p    tenant/a")),
        (("unpin", "p"), ("Let go of p.",)),
        (("flush", A), ("Forgotten in 1 tree.",)),
        (("flush", A), ("Nothing of it was cached.",)),
        (("flush", "--yes"), ("Nothing of it was cached.",)),
    ):
        assert coppice(*words) == 0, words
        out = capsys.readouterr().out
        assert all(word in out for word in said), (words, out)


def test_commands_for_programs(url: None, capsys: pytest.CaptureFixture[str]) -> None:
    for words, key in (
        (("stats",), "workers"),
        (("tree", A), "next_page_token"),
        (("explain", A, "--tokens", "[1,2]"), "workers"),
        (("audit",), "longest_slice_us"),
        (("pins",), "pins"),
        (("flush", A, "--tokens", "1,2,3,4"), "num_trees"),
    ):
        assert coppice(*words, "--json") == 0, words
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert key in json.loads(lines[0])


def test_a_broken_cache_is_exit_code_1(cache: Cache, url: None, capsys: pytest.CaptureFixture[str]) -> None:
    break_it(cache)
    assert coppice("audit") == 1
    assert "BROKEN I1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("tree", "nobody"), 2, "no domain 'nobody'"),
        (("explain", A), 2, "give the prompt"),
        (("explain", A, "--tokens", "1,x"), 2, "'x' is no token"),
        (("explain", A, "--tokens", "@/nowhere"), 2, "No such file"),
        (("explain", A, "--tokens", "1", "--text", "hello"), 2, "give the prompt, once"),
        (("explain", A, "--text", "hello", "--model", "/nowhere"), 2, "/nowhere"),
        (("unpin", "nothing"), 2, "no pin 'nothing'"),
        (("flush", "--tokens", "1"), 2, "a prefix lies in a domain"),
        (("stats", "--url", "ftp://x"), 2, "no address of a cache service"),
        (("stats", "--url", "http://127.0.0.1:99999"), 2, "no address of a cache service"),
    ],
)
def test_wrong_usage_is_one_sentence(
    url: None, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    assert coppice(*words) == code
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_a_service_that_is_down_and_a_grpc_port(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    (address,) = free_addresses(1)
    assert coppice("stats", "--url", f"http://{address}") == 1
    assert "no cache service answers" in capsys.readouterr().err
    assert coppice("stats", "--url", f"http://127.0.0.1:{cache.port}") == 2
    assert "is no cache service" in capsys.readouterr().err


def test_flushing_everything_is_confirmed(url: None, cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert coppice("flush") == 2
    assert "--yes" in capsys.readouterr().err
    assert cache.stats()["cached_blocks"] == 2


@pytest.mark.parametrize("text", ["", "[]", "1,,x", "4294967296", "-1", "1.5"])
def test_what_is_no_list_of_tokens(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tokens(text)


def test_lists_of_tokens() -> None:
    assert parse_tokens("1,2 3\n4") == parse_tokens("[1, 2, 3, 4]") == [1, 2, 3, 4]
