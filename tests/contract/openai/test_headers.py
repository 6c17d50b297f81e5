"""`x-request-id` on every answer; health by vLLM's name; scripts of web pages."""

from __future__ import annotations

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice.telemetry.logs import configure_logging
from coppice_scheduler.edge.base.settings import ServiceSettings
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, Served, events_of, read_until_closed, serving
from tests.fakes.waiting import wait_for

__all__ = ["served", "shared_server"]

ID = "gateway:7.a_b-c"
BODY = {"model": MODEL, "prompt": "one"}
ORIGIN = "https://chat.example"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", BODY, 200),
        ("POST", "/v1/completions", {**BODY, "stream": True}, 200),
        ("POST", "/v1/completions", {**BODY, "hue": 1}, 400),
        ("POST", "/v1/completions", {**BODY, "model": "x"}, 404),
        ("POST", "/tokenize", {"prompt": "a"}, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/nowhere", None, 404),
        ("DELETE", "/v1/models", None, 405),
        ("GET", "/healthz", None, 200),
    ],
)
def test_every_answer_has_the_id_of_its_request(
    served: Served, method: str, path: str, body: object, status: int
) -> None:
    answer = served.http.request(method, path, json=body, headers={"X-Request-Id": ID})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, [ID])
    ours = {served.http.request(method, path, json=body).headers["x-request-id"] for _ in range(2)}
    assert len(ours) == 2
    assert {len(one) for one in ours} == {32}


def test_the_id_of_an_answer_contains_it_and_is_unique(served: Served) -> None:
    headers = {"x-request-id": ID}
    chats = [served.http.post("/v1/chat/completions", json=chat(), headers=headers).json()["id"] for _ in range(2)]
    assert len(set(chats)) == 2
    assert all(one.startswith(f"chatcmpl-{ID}-") for one in chats)
    streamed = served.http.post("/v1/completions", json={**BODY, "stream": True}, headers=headers)
    (call_id,) = {event["id"] for event in events_of(streamed.text)[:-1]}
    assert call_id.startswith(f"cmpl-{ID}-")
    assert served.engine.requests[-1].request_id == f"{call_id}-0"


def chat() -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "one"}]}


def test_what_cannot_be_used_is_replaced(served: Served) -> None:
    for sent in ("x" * 65, "a b", "é".encode()):
        answer = served.http.post("/v1/completions", json=BODY, headers={"x-request-id": sent})
        assert len(answer.headers["x-request-id"]) == 32


def test_a_line_of_the_log_says_whose_request_failed(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("error")

    def broken(request: object) -> Script:
        raise RuntimeError("no engine is so broken")

    served.engine.script = broken
    answer = served.http.post("/v1/completions", json=BODY, headers={"x-request-id": ID})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, ID)
    lines: list[str] = []

    def is_said() -> bool:
        lines.append(capfd.readouterr().err)
        return f"[request {ID}] Exception in ASGI application" in "".join(lines)

    wait_for(is_said, "the line in the log, which comes after the answer")


def test_health_by_vllms_name_says_whether_requests_are_served(served: Served) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.head("/health").status_code == 200
    served.engine.ready = False
    assert served.http.get("/health").status_code == served.http.get("/readyz").status_code == 503
    assert served.http.get("/healthz").status_code == 200


def test_what_is_no_http_has_one_too(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"GARBAGE\r\n\r\n")
        assert b"\r\nx-request-id: " in read_until_closed(connection)


# ---- scripts of web pages


def preflight(served: Served, origin: str) -> tuple[int, str | None]:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = served.http.options("/v1/chat/completions", headers=headers)
    return answer.status_code, answer.headers.get("access-control-allow-origin")


def test_without_a_setting_no_page_may_call(served: Served) -> None:
    assert preflight(served, ORIGIN) == (405, None)
    answer = served.http.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_named_origins_may_call_and_read_errors_too() -> None:
    with serving(cors_origins=(ORIGIN,)) as served:
        assert preflight(served, ORIGIN) == (200, ORIGIN)
        assert preflight(served, "https://other.example") == (400, None)
        for body in (BODY, {**BODY, "hue": 1}, {**BODY, "stream": True}):
            answer = served.http.post("/v1/completions", json=body, headers={"origin": ORIGIN})
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers
        crowded = {f"x-{number}": "1" for number in range(70)}
        answer = served.http.post("/v1/completions", json=BODY, headers={"origin": ORIGIN, **crowded})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (400, ORIGIN)
        other = served.http.post("/v1/completions", json=BODY, headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_any_origin() -> None:
    with serving(cors_origins=("*",)) as served:
        assert preflight(served, ORIGIN) == (200, "*")


@pytest.mark.parametrize("wrong", ["https://chat.example/", "chat.example", "https://a b", "ftp://a", "**"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(UsageError, match="--cors-origins"):
        parse_settings(ServiceSettings, ["--model=m", f"--cors-origins={wrong}"], {}, "scheduler")
    given = parse_settings(
        ServiceSettings, ["--model=m", f"--cors-origins={ORIGIN},http://[::1]:3000"], {}, "scheduler"
    )
    assert given.cors_origins == (ORIGIN, "http://[::1]:3000")
