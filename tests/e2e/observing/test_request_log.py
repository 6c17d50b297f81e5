"""What clients were told is what is recorded, to the token, whatever dies meanwhile; and operators find it again."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coppice.request_log.reader import newest
from coppice.request_log.record import RequestRecord
from coppice.request_log.usage import summed
from tests.e2e.anthropic.test_agent_session import write_checkpoint
from tests.e2e.stack import Stack
from tests.e2e.test_front_doors import children, front_doors
from tests.fakes.api.engine import pack
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.long
CLIENTS = 12
CALLS = 6  # of each client
TOKENS = [17, 61, 7, 83, 29, 53, 11, 89, 2, 71, 13]  # a prompt that nothing else in a log looks like


class Client(threading.Thread):
    """Calls one after another, streams and whole answers; what it was told, by the ids of its requests."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self._stack = stack
        self._number = number
        self.told: dict[str, dict[str, int]] = {}
        self.broken: set[str] = set()

    def run(self) -> None:
        for call in range(CALLS):
            request_id = f"c{self._number}-{call}"
            body: dict[str, Any] = {"model": "tiny", "prompt": [self._number, *range(1, 9 + call)], "ignore_eos": True}
            body |= {"max_tokens": 20 + 10 * call, "temperature": 0}
            if call % 2:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            try:
                usage = self._usage_of(request_id, body)
            except (OSError, http.client.HTTPException):
                self.broken.add(request_id)
                continue
            if usage is None:
                self.broken.add(request_id)
            else:
                self.told[request_id] = usage

    def _usage_of(self, request_id: str, body: dict[str, Any]) -> dict[str, int] | None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._stack.port, timeout=120)) as connection:
            headers = {"content-type": "application/json", "x-request-id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != 200:
            return None
        parts = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")] or [text]
        usages = [found for part in parts if part != "[DONE]" and (found := json.loads(part).get("usage"))]
        return dict(usages[-1]) if usages else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "of requests"


@pytest.fixture(scope="module")
def admin() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path, admin: str) -> Iterator[Stack]:
    tmp = tmp_path_factory.mktemp("stack")
    arguments = ["--front-doors=2", f"--request-log={folder}", f"--metrics-port={admin.rpartition(':')[2]}"]
    with Stack(write_checkpoint(tmp / "model"), tmp / "stack", scheduler_args=arguments) as stack:
        yield stack


def coppice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coppice_cli", *arguments], capture_output=True, text=True, timeout=120
    )


def test_usage_is_what_clients_were_told_while_processes_are_killed(stack: Stack, folder: Path) -> None:
    clients = [Client(stack, number) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_for(lambda: sum(len(client.told) for client in clients) >= CLIENTS, "some answers")
    (planner,) = children(stack, "coppice_scheduler.edge.planner")
    os.kill(planner, signal.SIGKILL)
    wait_for(lambda: sum(len(client.told) for client in clients) >= 2 * CLIENTS, "more answers")
    os.kill(front_doors(stack)[0], signal.SIGKILL)
    for client in clients:
        client.join(300)
    told = {name: usage for client in clients for name, usage in client.told.items()}
    broken = set().union(*(client.broken for client in clients))
    assert len(told) + len(broken) == CLIENTS * CALLS
    assert len(told) > CLIENTS * CALLS / 2
    records: dict[str, list[RequestRecord]] = {}
    for record in newest(folder, 10_000):
        records.setdefault(record.id, []).append(record)
    for name, usage in told.items():
        (record,) = records[name]
        assert (record.tokens_in, record.tokens_out) == (usage["prompt_tokens"], usage["completion_tokens"]), name
        assert record.tokens_cached == usage["prompt_tokens_details"]["cached_tokens"], name
    others = [record for name, found in records.items() if name not in told for record in found]
    (used,) = summed((record for name in told for record in records[name]), ["tenant"])
    assert used.tokens_out == sum(usage["completion_tokens"] for usage in told.values())
    assert used.tokens_cached > 0
    ended = coppice("usage", str(folder), "--json")
    assert ended.returncode == 0, ended.stderr
    (row,) = [row for row in json.loads(ended.stdout)["usage"] if row["tenant"] == "default"]
    assert row["tokens_out"] == used.tokens_out + sum(record.tokens_out for record in others)
    assert any(record.moves for found in records.values() for record in found), "some went on at another planner"


def test_an_operator_finds_one_and_is_told_why(stack: Stack, folder: Path, admin: str) -> None:
    stack.wait_ready()
    client = Client(stack, 99)
    client.run()
    request_id = next(iter(client.told))
    ended = coppice("why", request_id, "--url", admin)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{request_id} of default: 200 length, ")
    assert "because it" in ended.stdout
    listed = coppice("requests", "--limit", "3", "--url", admin)
    assert len(listed.stdout.splitlines()) == 4
    unknown = coppice("why", "nobody", "--url", admin)
    assert unknown.returncode == 2
    assert "no request 'nobody' is among those that are kept" in unknown.stderr
    for wrong in ("since", "nowhere"):
        assert coppice("usage", str(folder), "--from", wrong).returncode == 2
    assert stack.get(f"{admin}/requests?limit=0")[0] == 400


def token_forms() -> list[str]:
    """TOKENS as a log or a page could show them, in decimal or packed."""
    packed = pack(TOKENS)
    return [*(sign.join(map(str, TOKENS)) for sign in (", ", ",", " ")), packed.hex(), b64encode(packed).decode()]


def test_nothing_that_a_client_said_is_told_to_operators(stack: Stack, folder: Path, admin: str) -> None:
    canary = "canary-5c1f9e"
    with closing(http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)) as connection:
        for path, body in (
            ("/v1/completions", {"prompt": canary, "max_tokens": 3}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": canary}], "max_tokens": 3}),
            ("/v1/completions", {"prompt": canary, "max_tokens": "wrong"}),
            ("/v1/completions", {"prompt": canary, "no_such_field": canary}),
            ("/v1/completions", {"prompt": TOKENS, "max_tokens": 3}),
            ("/v1/completions", {"prompt": TOKENS, "max_tokens": -3}),
        ):
            headers = {"content-type": "application/json", "authorization": f"Bearer {canary}", "x-request-id": "said"}
            connection.request("POST", path, json.dumps({"model": "tiny", **body}), headers)
            connection.getresponse().read()
    wait_for(lambda: len(newest(folder, 99, asked="said")) == 6, "six records")
    urls = [f"{admin}/requests?limit=1000", f"{admin}/requests/said", f"{admin}/metrics", f"{stack.url}/metrics"]
    urls += [f"http://127.0.0.1:{stack.cache_http}/{page}" for page in ("metrics", "v1/stats")]
    urls += [f"http://127.0.0.1:{port}/metrics" for port in stack.worker_http]
    pages = [stack.get(url) for url in urls]
    assert {status for status, _ in pages} == {200}
    told = [json.dumps(page) for _, page in pages]
    files = [path.read_text() for path in (*folder.iterdir(), *stack.folder.glob("*.log"))]
    said = [canary, *token_forms()]
    assert [text[:80] for text in (*told, *files) if any(form in text for form in said)] == []
