"""Tenants change while the stack runs: nothing is started again, nobody else notices."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coppice.tenants.file import version_of
from coppice_cli.tenants.operations import add_tenant, revoke
from tests.e2e.stack import Stack
from tests.fakes.waiting import WAIT_S, wait_for

BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


@pytest.fixture
def keys(path: Path) -> dict[str, str]:
    return {name: add_tenant(path, name, {"max_share": 0.5}, "main") for name in ("acme", "zeta")}


@pytest.fixture
def changing(checkpoint: Path, tmp_path: Path, path: Path, keys: dict[str, str]) -> Iterator[Stack]:
    """The front doors' number shows that each of them hears of a change."""
    arguments = ["--front-doors=2"]
    with Stack(checkpoint, tmp_path / "logs", num_blocks=128, tenants=path, scheduler_args=arguments) as stack:
        yield stack


def status(stack: Stack, key: str) -> int:
    return stack.post("/v1/completions", BODY, key)[0]


def ready_lines(stack: Stack) -> list[str]:
    """Of the operator's port."""
    code, text = stack.get(f"http://127.0.0.1:{stack.metrics_port}/readyz")
    assert code == 200
    return str(text).splitlines()


def at_work(stack: Stack) -> float:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(stack.metric(stack.metrics_port, name) for name in names)


def test_a_revoked_key_ends_its_requests_and_no_others(changing: Stack, path: Path, keys: dict[str, str]) -> None:
    assert [status(changing, key) for key in keys.values()] == [200, 200]
    wait_for(lambda: at_work(changing) == 0, "rest")
    worker = changing.services["worker-0"]
    worker.signal(signal.SIGSTOP)  # so that what is asked now is at work still when the file changes
    try:
        with ThreadPoolExecutor(2) as pool:
            gone = pool.submit(changing.post, "/v1/completions", BODY, keys["acme"])
            stays = pool.submit(changing.post, "/v1/completions", {**BODY, "stream": True}, keys["zeta"])
            wait_for(lambda: at_work(changing) == 2, "both to be at work")
            revoke(path, "acme", "main")
            code, answer = gone.result(WAIT_S)
            assert (code, answer["error"]["code"]) == (401, "key_revoked")
            assert not stays.done()
            worker.signal(signal.SIGCONT)
            code, answer = stays.result(WAIT_S)
            assert (code, "[DONE]" in answer) == (200, True)
    finally:
        worker.signal(signal.SIGCONT)
    wait_for(lambda: {status(changing, keys["acme"]) for _ in range(4)} == {401}, "both front doors to refuse it")
    assert status(changing, keys["zeta"]) == 200


def versions(stack: Stack) -> set[str]:
    """Of both services."""
    lines = ready_lines(stack)
    return {stack.get(f"http://127.0.0.1:{stack.cache_http}/readyz")[1]["tenants_version"], lines[1].rsplit(" ", 1)[1]}


@pytest.mark.wide
def test_a_tenant_is_added_and_served_and_nobody_notices(changing: Stack, path: Path, keys: dict[str, str]) -> None:
    before = [service.process for service in changing.services.values()]
    prompt = list(range(1, 60))
    assert changing.post("/v1/completions", {**BODY, "prompt": prompt}, keys["acme"])[0] == 200
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        statuses = pool.submit(lambda: {status(changing, keys["zeta"]) for _ in iter(stop.is_set, True)})
        key = add_tenant(path, "nova", {"guarantee_share": 0.25}, "main")
        wait_for(lambda: {status(changing, key) for _ in range(4)} == {200}, "both front doors to know it")
        stop.set()
        assert statuses.result(WAIT_S) == {200}
    version = version_of(path.read_bytes())
    wait_for(lambda: versions(changing) == {version}, "both services to agree on the version")
    assert [service.process for service in changing.services.values()] == before
    usage = changing.post("/v1/completions", {**BODY, "prompt": prompt}, keys["acme"])[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48, "what others have cached is there still"


def limits_told(stack: Stack, key: str) -> set[tuple[int, int]]:
    """(context, cached tokens) that a tenant is told, by several connections: each front door gets some of them."""
    told = set()
    for _ in range(6):
        context = stack.post("/tokenize", {"prompt": "one"}, key)[1]["max_model_len"]
        usage = stack.post("/v1/completions", {**BODY, "prompt": list(range(1, 60))}, key)[1]["usage"]
        told.add((context, usage["prompt_tokens_details"]["cached_tokens"]))
    return told


@pytest.mark.wide
def test_what_narrows_a_tenant_reaches_all_front_doors(changing: Stack, path: Path, keys: dict[str, str]) -> None:
    before = path.read_text()
    body = {**BODY, "prompt": list(range(1, 60))}
    assert changing.post("/v1/completions", body, keys["zeta"])[0] == 200
    context = changing.post("/tokenize", {"prompt": "one"}, keys["acme"])[1]["max_model_len"]
    assert limits_told(changing, keys["zeta"]) == {(context, 48)}
    path.write_text(before + "    max_context: 64\n    shows_cached_tokens: false\n")
    wait_for(lambda: limits_told(changing, keys["zeta"]) == {(64, 0)}, "both front doors to hear of it")
    code, answer = changing.post("/v1/completions", {**body, "max_tokens": 6}, keys["zeta"])
    assert (code, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "This tenant's context is 64 tokens" in answer["error"]["message"]
    path.write_text(before + "    models: [other]\n")
    wait_for(lambda: {status(changing, keys["zeta"]) for _ in range(6)} == {404}, "both front doors to hear of it")
    assert status(changing, keys["acme"]) == 200, "others have what they had"
    path.write_text(before)
    wait_for(lambda: {status(changing, keys["zeta"]) for _ in range(6)} == {200}, "all to be as before")


@pytest.mark.wide
def test_shares_that_a_worker_cannot_keep_are_refused_by_the_cache(changing: Stack, path: Path) -> None:
    url, before = f"http://127.0.0.1:{changing.cache_http}/readyz", path.read_bytes()
    add_tenant(path, "huge", {"guarantee_blocks": 1000}, "main")
    changing.services["cache"].signal(signal.SIGHUP)
    wait_for(lambda: changing.get(url)[1]["status"] == "degraded", "the cache to refuse it")
    (reason,) = changing.get(url)[1]["reasons"]
    assert "the guarantees of all domains sum to 1000 blocks (tenant/huge 1000" in reason
    assert changing.get(url)[1]["tenants_version"] == version_of(before)


@pytest.mark.wide
def test_a_wrong_file_changes_nothing_and_ready_says_line_and_key(
    changing: Stack, path: Path, keys: dict[str, str]
) -> None:
    right = path.read_text()
    path.write_text(right + "    wieght: 2\n")
    wait_for(lambda: len(ready_lines(changing)) == 3, "the file to be refused")
    line = len(right.splitlines()) + 1
    assert f"tenants.yaml:{line}: unknown key tenants.1.wieght; did you mean weight?" in ready_lines(changing)[2]
    assert [status(changing, key) for key in keys.values()] == [200, 200]
    assert changing.metric(changing.metrics_port, "coppice_tenants_file_errors_total") == 1
    assert "wieght" in changing.logs()
    text = changing.get(f"{changing.url}/readyz")[1]
    assert text.endswith("a newer tenants file is refused\n"), "what is wrong is not for everybody"
    changing.services["scheduler"].signal(signal.SIGHUP)
    wait_for(lambda: changing.metric(changing.metrics_port, "coppice_tenants_file_errors_total") == 2, "SIGHUP")
    path.write_text(right)
    version = f"tenants file: version {version_of(right.encode())}"
    wait_for(lambda: ready_lines(changing) == ["ready", version], "the file to be right again")
    assert changing.get(f"{changing.url}/readyz")[1] == f"ready\n{version}\n"
