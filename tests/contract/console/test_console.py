"""The console over HTTP: what is served and how, what a page of ours may ask, and the feed of the map of blocks."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import closing
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from coppice import __version__
from coppice_cache.edge.api.admin_http import build_app
from coppice_cache.edge.api.console import Elsewhere
from coppice_cache.edge.settings import CacheSettings
from tests.fakes.cache.cache_ends import Cache, FakeWorker, UnaryClient, prompt

Keep = Callable[[Any], Any]
OURS = "http://127.0.0.1:8071"
REQUESTS, REST = "http://127.0.0.1:8073", "http://127.0.0.1:8000"
EXPLAIN = {"domain": "tenant/a", "tokens": [1, 2, 3, 4, 5]}


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def client(cache: Cache) -> Iterator[TestClient]:
    process = cache.process
    app = build_app(
        process._service, CollectorRegistry(), process._readiness, elsewhere=Elsewhere(REQUESTS, REST), names=("cache",)
    )
    with closing(TestClient(app, base_url=OURS, raise_server_exceptions=False)) as opened:
        yield opened


# ---- what is served


class Page(HTMLParser):
    """Tags with their attributes, and the text inside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


def names_in(path: str, text: str) -> set[str]:
    """Paths of what a file of the console loads."""
    if path.endswith(".js"):
        found = re.findall(r"""(?:\bfrom|\bimport)\s+"([^"]+)";""", text)
    elif path == "/":
        found = [str(a.get("src") or a.get("href")) for tag, a in Page(text).tags if tag in ("script", "link", "img")]
    else:
        found = re.findall(r"url\(([^)]+)\)|@import", text)
    return {urljoin(path, name) for name in found}


def all_files(client: TestClient) -> dict[str, Any]:
    """Answers by path, from the page to all that it loads."""
    waiting, found = {"/"}, {}
    while waiting:
        path = waiting.pop()
        found[path] = client.get(path)
        assert found[path].status_code == 200, path
        waiting |= names_in(path, found[path].text) - set(found)
    return found


def test_the_page_and_all_that_it_loads_are_served_with_their_types(client: TestClient) -> None:
    found = all_files(client)
    assert len(found) > 15
    kinds = {"": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path, answer in found.items():
        ending = re.search(r"(\.\w+)?$", path)
        assert ending is not None
        assert answer.headers["content-type"].split(";")[0] == kinds[ending[0]], path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(client: TestClient) -> None:
    for path, answer in all_files(client).items():
        addresses = {found.rstrip(".") for found in re.findall(r"https?://[\w.:/-]+", answer.text)}
        addresses -= {"http://www.w3.org/2000/svg", "http://HOST:PORT"}
        assert not addresses, (path, addresses)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", answer.text
        ), path
    page = Page(client.get("/").text)
    assert not page.inline
    assert not [
        (tag, name) for tag, attributes in page.tags for name in attributes if name == "style" or name[:2] == "on"
    ]


def test_a_browser_runs_and_asks_only_what_the_policy_names(client: TestClient) -> None:
    for path in ("/", "/console/app.js"):
        policy = dict(part.split(" ", 1) for part in client.get(path).headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["img-src"] == "'self'"
        assert policy["connect-src"] == f"'self' {REQUESTS} {REST}"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"


def test_a_file_is_sent_again_only_when_it_changed(client: TestClient) -> None:
    first = client.get("/console/app.js")
    again = client.get("/console/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert client.get("/console/app.js", headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "", "../api/console.py", "%2e%2e/api/console.py", "..%2fapi%2fconsole.py", "pages", "/etc/passwd"],
)
def test_nothing_but_its_files_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/console/{name}").status_code == 404


def test_a_page_learns_where_the_rest_of_the_stack_is(client: TestClient, cache: Cache) -> None:
    answer = client.get("/console/config.json")
    assert answer.json() == {"requests_url": REQUESTS, "rest_url": REST, "version": __version__}
    assert answer.headers["cache-control"] == "no-store"
    assert cache.rest("/console/config.json")[1] == {"requests_url": "", "rest_url": "", "version": __version__}


@pytest.mark.parametrize(
    ("url", "is_taken"),
    [
        ("", True),
        ("http://127.0.0.1:8073", True),
        ("https://requests.internal", True),
        ("http://[::1]:8073", True),
        ("http://127.0.0.1:8073/", False),
        ("http://a; script-src *", False),
        ("http://a 'unsafe-inline'", False),
        ("http://a\r\nX: y", False),
        ("http://a\n", False),
        ("javascript:alert(1)", False),
        ("*", False),
    ],
)
def test_what_becomes_part_of_the_policy_is_an_origin(url: str, is_taken: bool) -> None:
    for name in ("requests_url", "rest_url"):
        if is_taken:
            assert getattr(CacheSettings(**{name: url}), name) == url
        else:
            with pytest.raises(ValidationError):
                CacheSettings(**{name: url})


# ---- what a page of ours may ask


def test_the_console_may_explain(client: TestClient) -> None:
    assert client.post("/v1/explain", json=EXPLAIN, headers={"Origin": OURS}).status_code == 404  # no such domain
    named = {"Origin": "http://CACHE:8071", "Host": "cache:8071"}
    assert client.post("/v1/explain", json=EXPLAIN, headers=named).status_code == 404


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1",
        "http://127.0.0.1:8072",
        "http://127.0.0.1:8071.evil.example",
        "null",
        "",
    ],
)
def test_no_other_page_may(client: TestClient, origin: str) -> None:
    said = client.post("/v1/explain", json=EXPLAIN, headers={"Origin": origin})
    assert (said.status_code, said.json()["error"]["code"]) == (403, "foreign_origin")


def test_two_origins_are_nobodys(client: TestClient) -> None:
    said = client.post("/v1/explain", json=EXPLAIN, headers=[("Origin", "http://evil.example"), ("Origin", OURS)])
    assert said.status_code == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audit"),
        ("POST", "/v1/invalidate"),
        ("PUT", "/v1/pins/a"),
        ("DELETE", "/v1/pins/a"),
        ("POST", "/v1/explain/"),
    ],
)
def test_the_console_can_change_nothing(client: TestClient, method: str, path: str) -> None:
    said = client.request(method, path, json={}, headers={"Origin": OURS})
    assert (said.status_code, said.json()["error"]["code"]) == (403, "foreign_origin")


# ---- the map of blocks


def cells_of(answer: Any) -> list[int]:
    cells = np.frombuffer(b64decode(answer["cells"]), "<u2")
    if answer["run_lengths"] is None:
        return [int(cell) for cell in cells]
    return [int(cell) for cell in np.repeat(cells, np.frombuffer(b64decode(answer["run_lengths"]), "<u4"))]


def test_the_map_tells_every_block(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9), "tenant/a")
    client.publish(1, prompt(8))
    client.release(1)
    client.acquire(2, prompt(9), "tenant/b")
    status, found = cache.rest("/v1/blocks?worker=w")
    assert status == 200
    assert [domain["domain"] for domain in found["domains"]] == ["tenant/a", "tenant/b"]
    assert (found["num_blocks"], found["block_size"], found["fences"], found["open"]) == (16, 4, 0, True)
    cells = cells_of(found)
    assert len(cells) == 16
    assert (cells.count(4 + 2), cells.count(8 + 1), cells.count(0)) == (2, 3, 11)


def test_a_pool_without_runs_is_told_block_by_block(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    client = keep(UnaryClient(cache))
    for number in range(8):
        client.acquire(number, prompt(4, first=100 * number), f"tenant/{'ab'[number % 2]}")
    assert cache.rest("/v1/blocks?worker=w")[1]["run_lengths"] is None
    cells = cells_of(cache.rest("/v1/blocks?worker=w")[1])
    assert sorted(cells) == [0] * 8 + [4 + 1] * 4 + [8 + 1] * 4


def test_a_map_of_who_is_not_there(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    for path in ("worker=nobody", "worker=w&tier=host", "worker=w&tier=disk"):
        status, said = cache.rest(f"/v1/blocks?{path}")
        assert (status, said["error"]["code"]) == (404, "worker_not_found")
    assert cache.rest("/v1/blocks")[0] == 400
    assert cache.rest("/v1/blocks?worker=w&tier=tape")[0] == 400
