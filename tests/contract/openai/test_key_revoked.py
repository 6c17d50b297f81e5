"""A key is revoked while requests run that came with it: they end and say so, and no other does."""

from __future__ import annotations

import threading

import httpx
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, WAIT_S, Served, error_of, events_of, serving


def directory(**keys: tuple[str, ...]) -> TenantDirectory:
    tenants = [
        Tenant(id=name, api_key_sha256=tuple(ApiKey(sha256=digest_of_key(key)) for key in of_tenant))
        for name, of_tenant in keys.items()
    ]
    return TenantDirectory(tenants, version="abc")


class Caller(threading.Thread):
    """One call that hangs until something ends it."""

    def __init__(self, served: Served, key: str, **fields: object) -> None:
        super().__init__()
        self._served, self._key, self._fields = served, key, fields
        self.answer: httpx.Response | None = None
        served.engine.some_hanging.clear()
        self.start()
        assert served.engine.some_hanging.wait(WAIT_S)

    def run(self) -> None:
        body = {"model": MODEL, "prompt": "x", **self._fields}
        headers = {"authorization": f"Bearer {self._key}"}
        self.answer = httpx.post(f"{self._served.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)

    def wait(self) -> httpx.Response:
        self.join(WAIT_S)
        assert self.answer is not None
        return self.answer


@pytest.mark.parametrize("is_stream", [True, False])
def test_requests_with_a_revoked_key_end_and_say_so(is_stream: bool) -> None:
    with serving(directory(a=("old", "new"), b=("other",))) as served:
        served.engine.script = lambda request: Script([65], hangs=True)
        gone = Caller(served, "old", stream=is_stream)
        stay = [Caller(served, key) for key in ("new", "other")]
        served.set_tenants(directory(a=("new",), b=("other",)))
        answer = gone.wait()
        error = events_of(answer.text)[-1]["error"] if is_stream else error_of(answer, 401)
        assert (error["code"], error["message"]) == ("key_revoked", "The API key of this request was revoked.")
        assert [caller.is_alive() for caller in stay] == [True, True]
        assert len(served.engine.ended_with) == 1
        assert served.post({"model": MODEL, "prompt": "x"}, headers={"authorization": "Bearer old"}).status_code == 401
        served.set_tenants(directory(c=("third",)))
        assert [error_of(caller.wait(), 401)["code"] for caller in stay] == ["key_revoked"] * 2


def test_a_tenant_is_added_and_nobody_notices() -> None:
    with serving(directory(a=("old",))) as served:
        served.engine.script = lambda request: Script([65], hangs=True)
        stay = Caller(served, "old")
        served.set_tenants(directory(a=("old",), b=("other",)))
        served.says("y")
        answer = served.post({"model": MODEL, "prompt": "x"}, headers={"authorization": "Bearer other"})
        assert answer.status_code == 200
        assert stay.is_alive()
        served.set_tenants(directory(b=("other",)))
        assert stay.wait().status_code == 401


def test_ready_says_the_version_and_nothing_of_tenants() -> None:
    with serving(directory(a=("old",))) as served:
        assert served.http.get("/readyz").text == "ready\ntenants file: version abc\n"
        served.engine.tenants_refused = True
        assert served.http.get("/readyz").text.endswith("a newer tenants file is refused\n")
    with serving() as served:
        assert served.http.get("/readyz").text == "ready\n"
