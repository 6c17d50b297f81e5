"""The audit log: each act of an operator leaves a line, and no line has what somebody sent to a model."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from coppice.ids import WorkerId
from coppice.tenants.keys import digest_of_key
from coppice_cache.edge.api.admin_http import build_app
from coppice_rpc.v1 import cache_admin_pb2 as pb
from tests.contract.worker.test_worker_service import Stack
from tests.fakes.api.surface import QUESTIONS, call, methods, path_of, routes
from tests.fakes.cache.cache_ends import NAMESPACE, Cache, FakeWorker, UnaryClient, tokens

Keep = Callable[[Any], Any]
TOKEN = 0xBAD0CAFE
PROMPT = [TOKEN] * 8
FORMS_OF_TOKEN = (str(TOKEN), "bad0cafe", tokens(TOKEN).hex())
KEY, NEW_KEY = "sk-the-old-key", "sk-the-new-key"

# What changes nothing and tells nothing of a prompt. Everything else of these services leaves a line.
GRPC_QUESTIONS = {"DumpTree", "ListPins", "Stats"}

REST_BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/explain"): {"domain": "tenant/a", "tokens": PROMPT},
    ("POST", "/v1/invalidate"): {"domain": "tenant/a", "namespace": NAMESPACE.hex(), "tokens": PROMPT},
    ("PUT", "/v1/pins/a"): {"domain": "tenant/a", "namespace": NAMESPACE.hex(), "tokens": PROMPT},
}
GRPC_REQUESTS: dict[str, Any] = {
    "Explain": pb.ExplainRequest(domain="tenant/a", tokens=tokens(*PROMPT)),
    "Invalidate": pb.InvalidateRequest(domain="tenant/a", namespace=NAMESPACE, tokens=tokens(*PROMPT)),
    "Pin": pb.PinRequest(name="system", domain="tenant/a", namespace=NAMESPACE, tokens=tokens(*PROMPT)),
    "Unpin": pb.UnpinRequest(name="system"),
    "Watch": pb.WatchRequest(domains=["tenant/a"]),
}


class Audited:
    """A cache with an audit log, and a prefix of tenant/a in it."""

    def __init__(self, keep: Keep, folder: Path, **settings: Any) -> None:
        self.path = folder / "audit.log"
        self.cache: Cache = keep(Cache(audit_log=str(self.path), audit_interval_s=0, **settings))
        keep(FakeWorker(self.cache)).wait_registered()
        client: UnaryClient = keep(UnaryClient(self.cache))
        client.acquire(1, tokens(*PROMPT, 1), "tenant/a")
        client.publish(1, tokens(*PROMPT))
        client.release(1)

    def app(self) -> Any:
        process = self.cache.process
        return build_app(process._service, CollectorRegistry(), process._readiness, audit=process._audit)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def audited(keep: Keep, tmp_path: Path) -> Audited:
    return Audited(keep, tmp_path)


@pytest.fixture
def rest(audited: Audited) -> Iterator[TestClient]:
    with closing(TestClient(audited.app(), base_url="http://127.0.0.1:8071")) as client:
        yield client


@pytest.fixture
def channel(audited: Audited) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{audited.cache.admin_port}") as opened:
        yield opened


# ---- every act has its line


def test_every_route_that_is_no_question_leaves_a_line(audited: Audited, rest: TestClient) -> None:
    """Whether it is done, or is refused by what it says, by the guard, or because nothing can be made of it."""
    acts = [(method, path) for method, path in routes(rest.app) if method not in QUESTIONS]
    assert set(acts) > set(REST_BODIES)
    for method, path in acts:
        for body, headers in (
            (REST_BODIES.get((method, path), {}), {}),
            ({"tokens": PROMPT, "nonsense": PROMPT}, {}),
            ({"tokens": PROMPT}, {"Origin": "http://evil.example"}),
            ({"tokens": PROMPT}, {"Host": "evil.example"}),
        ):
            before = len(audited.lines())
            said = rest.request(method, path, json=body, headers=headers)
            written = audited.lines()[before:]
            assert len(written) == 1, (method, path, body)
            assert written[0]["code"] == str(said.status_code)
            assert written[0]["result"] == ("done" if said.status_code < 400 else "refused")
            assert (written[0]["service"], written[0]["via"], written[0]["by"]) == (
                "cache",
                "REST",
                "testclient:50000",
            )
    no_content(audited.path.read_text())


def test_every_method_that_is_no_question_leaves_a_line(audited: Audited, channel: grpc.Channel) -> None:
    for method in methods("PrefixIndexAdmin"):
        before = len(audited.lines())
        for request in (GRPC_REQUESTS.get(method.name), None):
            call(channel, method, request)
        written = audited.lines()[before:]
        if method.name in GRPC_QUESTIONS:
            assert not written, path_of(method)
            continue
        assert len(written) == 2, path_of(method)
        for line in written:
            assert (line["verb"], line["via"]) == (method.name.lower(), "gRPC")
            assert line["by"].startswith("ipv4:127.0.0.1:")
    no_content(audited.path.read_text())


def test_draining_a_worker_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    stack = Stack()
    try:
        with caplog.at_level(logging.INFO, "coppice.audit"), grpc.insecure_channel(stack.grpc_address) as channel:
            for method in methods("Worker"):
                caplog.clear()
                call(channel, method)
                written = [
                    json.loads(record.getMessage()) for record in caplog.records if record.name == "coppice.audit"
                ]
                wanted = [] if method.name in GRPC_QUESTIONS else [("worker", method.name.lower(), "done")]
                assert [(line["service"], line["verb"], line["result"]) for line in written] == wanted
    finally:
        stack.close()


def no_content(text: str) -> None:
    assert not [form for form in FORMS_OF_TOKEN if form in text.lower()]


# ---- what a line says


def test_a_line_says_who_did_what_to_whom_and_how_much(audited: Audited, rest: TestClient) -> None:
    rest.put("/v1/pins/system", json=REST_BODIES["PUT", "/v1/pins/a"])
    rest.post("/v1/invalidate", json={"domain": "tenant/a"})
    rest.delete("/v1/pins/system")
    rest.delete("/v1/pins/system")
    rest.post("/v1/explain", json={"domain": "tenant/nobody", "tokens": PROMPT})
    pin, invalidate, unpin, again, explain = audited.lines()
    assert pin["time"].endswith("Z")
    namespace = NAMESPACE.hex()
    about = {"name": "system", "domain": "tenant/a", "namespace": namespace}
    assert pin.items() >= {"verb": "pin", **about, "count": 8, "result": "done", "code": "200"}.items()
    told = {"verb": "invalidate", "domain": "tenant/a", "namespace": "", "below_a_prefix": False, "count": 1}
    assert invalidate.items() >= told.items()
    assert unpin.items() >= {"verb": "unpin", "name": "system", "count": 1, "result": "done"}.items()
    assert again.items() >= {"count": 0, "result": "refused", "code": "404"}.items()
    assert explain.items() >= {"domain": "tenant/nobody", "result": "refused"}.items()


def test_an_audit_that_finds_something_was_done(audited: Audited, rest: TestClient) -> None:
    audited.cache.process._service._locked.core.state.workers[WorkerId("w")].ledger.counts[0] += 1
    assert rest.post("/v1/audit").status_code == 500
    (line,) = audited.lines()
    assert line.items() >= {"verb": "audit", "holds": False, "result": "done", "code": "500"}.items()


def test_a_watcher_of_tokens_is_on_record_from_its_first_message(audited: Audited, channel: grpc.Channel) -> None:
    (method,) = [method for method in methods("PrefixIndexAdmin") if method.name == "Watch"]
    call(channel, method, pb.WatchRequest(domains=["tenant/a"]))
    call(channel, method, pb.WatchRequest(domains=["tenant/a"], with_tokens=True))
    plain, with_tokens = audited.lines()
    assert (plain["domains"], plain["with_tokens"], plain["result"]) == (["tenant/a"], False, "done")
    assert (with_tokens["with_tokens"], with_tokens["result"]) == (True, "refused")
    assert with_tokens["code"] == "PERMISSION_DENIED"


def test_a_name_that_is_too_long_is_cut(audited: Audited, rest: TestClient) -> None:
    rest.delete("/v1/pins/" + "a" * 5000)
    assert len(audited.lines()[0]["name"]) == 256


# ---- the tenants file


def tenants_text(*entries: str) -> str:
    return "tenants:\n" + "".join(f"  - {entry}\n" for entry in entries)


def entry(name: str, *keys: str, extra: str = "") -> str:
    listed = ", ".join(f'{{sha256: "{digest_of_key(key)}", name: {key[3:]}}}' for key in keys)
    return f"{{id: {name}, api_key_sha256: [{listed}]{extra}}}"


def test_a_tenants_file_tells_what_it_brought_and_took(keep: Keep, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(tenants_text(entry("a", KEY), entry("b")))
    audited = Audited(keep, tmp_path, tenants=str(file))

    def change(*entries: str) -> dict[str, Any]:
        file.write_text(tenants_text(*entries))
        audited.cache.process.look_at_tenants(always=True)
        return audited.lines()[-1]

    (first,) = audited.lines()
    assert (first["tenants_added"], first["keys_added"]) == (["a", "b"], ["a/the-old-key"])
    line = change(entry("a", NEW_KEY, extra=", weight: 2"), entry("c"))
    assert (line["verb"], line["by"], line["via"], line["result"]) == ("tenants", str(file), "file", "done")
    assert (line["tenants_added"], line["tenants_removed"], line["tenants_changed"]) == (["c"], ["b"], ["a"])
    assert (line["keys_added"], line["keys_revoked"]) == (["a/the-new-key"], ["a/the-old-key"])
    assert (line["count"], line["version_before"]) == (5, first["version"])
    refused = change(entry("a", extra=", wieght: 2"))
    assert (refused["result"], "wieght" in refused["problem"]) == ("refused", True)
    assert refused["version_before"] == line["version"]
    text = audited.path.read_text()
    assert not [secret for key in (KEY, NEW_KEY) for secret in (key, digest_of_key(key)) if secret in text]


# ---- the file


def test_the_file_is_its_owners_alone_and_may_be_moved_away(audited: Audited, rest: TestClient) -> None:
    assert stat.S_IMODE(audited.path.stat().st_mode) == 0o600
    rest.delete("/v1/pins/one")
    moved = audited.path.rename(audited.path.with_suffix(".1"))
    rest.delete("/v1/pins/two")
    rest.delete("/v1/pins/three")
    assert [json.loads(line)["name"] for line in moved.read_text().splitlines()] == ["one"]
    assert [line["name"] for line in audited.lines()] == ["two", "three"]
    assert stat.S_IMODE(audited.path.stat().st_mode) == 0o600


def test_a_line_that_the_file_does_not_take_is_in_the_log(
    audited: Audited, rest: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    audited.path.unlink()
    audited.path.mkdir()
    rest.delete("/v1/pins/one")
    assert '"name": "one"' in caplog.text
    assert rest.get("/readyz").json()["status"] == "degraded"
    audited.path.rmdir()
    rest.delete("/v1/pins/two")
    assert [line["name"] for line in audited.lines()] == ["two"]
    assert rest.get("/readyz").json()["status"] == "ready"


def test_a_service_does_not_start_without_the_log_that_it_was_given(tmp_path: Path) -> None:
    from coppice.errors import UsageError

    with pytest.raises(UsageError, match=r"cannot write the audit log .*/missing/x: No such file"):
        Cache(audit_log=str(tmp_path / "missing" / "x"))
