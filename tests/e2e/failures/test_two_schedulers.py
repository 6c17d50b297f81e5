"""A second scheduler on the same cache service and worker, as real processes: who serves, and who serves again."""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coppice.tenants.keys import digest_of_key
from tests.e2e.stack import Service, Stack
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def status_of(stack: Stack, port: int) -> int:
    stack_port, stack.port = stack.port, port
    try:
        body: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "timeout": 5}
        return stack.post("/v1/completions", body)[0]
    finally:
        stack.port = stack_port


def second_scheduler(stack: Stack, folder: Path) -> tuple[Service, int]:
    """Another process with its own front door, and its port."""
    port = free_port()
    cache = f"--cache=127.0.0.1:{stack.cache_sessions}"
    flags = [f"--port={port}", f"--grpc-port={free_port()}", f"--model={stack.checkpoint}", "--model-name=tiny"]
    if stack.tenants is not None:
        flags += [f"--tenants={stack.tenants}", f"--metrics-port={free_port()}"]
    argv = [sys.executable, "-m", "coppice_scheduler", cache, *flags, "--drain-s=2"]
    second = Service("second", argv, folder / "second.log")
    second.start()
    return second, port


def readiness(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


@pytest.mark.wide
@pytest.mark.parametrize("is_killed", [False, True])
def test_one_of_two_schedulers_stands_by_and_takes_over_the_only_worker(
    checkpoint: Path, tmp_path: Path, is_killed: bool
) -> None:
    with Stack(checkpoint, tmp_path) as stack:
        assert status_of(stack, stack.port) == 200
        second, port = second_scheduler(stack, tmp_path)
        wait_for(lambda: readiness(port)[0] == 503, "the second scheduler to stand by")
        assert status_of(stack, stack.port) == 200
        first = stack.services["scheduler"]
        if is_killed:
            first.kill()
        else:
            assert first.stop() == 0
        wait_for(lambda: readiness(port)[0] == 200, "the second one to have the worker")
        assert status_of(stack, port) == 200
        first.start()
        wait_for(lambda: readiness(stack.port)[0] == 503, "the first one to stand by")
        assert second.stop() == 0
        wait_for(lambda: status_of(stack, stack.port) == 200, "the first one serves again")
        stack.wait_at_rest()


@pytest.mark.wide
def test_two_schedulers_share_two_workers_and_one_has_both_when_the_other_is_gone(
    checkpoint: Path, tmp_path: Path
) -> None:
    with Stack(checkpoint, tmp_path, num_workers=2) as stack:
        stack.restore()
        second, port = second_scheduler(stack, tmp_path)
        wait_for(lambda: readiness(port)[0] == 200, "the second scheduler to have a worker")
        assert [status_of(stack, each) for each in (stack.port, port)] == [200, 200]
        attached = second.log.read_text().count("attached to worker")
        assert attached == 1
        stack.services["scheduler"].kill()
        wait_for(lambda: second.log.read_text().count("attached to worker") == 2, "it to have both")
        assert status_of(stack, port) == 200
        assert second.stop() == 0


TENANTS = f"""
tenants:
  - {{id: acme, api_key_sha256: {digest_of_key("acme-key")}, tokens_per_minute: 60}}
"""


@pytest.mark.wide
def test_a_limit_per_minute_is_that_of_both_schedulers(checkpoint: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)
    body = {"model": "tiny", "prompt": list(range(1, 41)), "max_tokens": 20, "ignore_eos": True}
    with Stack(checkpoint, tmp_path, num_workers=2, tenants=tenants) as stack:
        second, port = second_scheduler(stack, tmp_path)
        wait_for(lambda: readiness(port)[0] == 200, "the second scheduler to have a worker")
        assert stack.post("/v1/completions", body, "acme-key")[0] == 200
        stack.port = port
        small = {**body, "prompt": [1, 2, 3], "max_tokens": 1}  # the second alone would take fifteen of them
        answers: list[tuple[int, Any]] = []
        while len(answers) < 10 and not (answers and answers[-1][0] == 429):
            answers.append(stack.post("/v1/completions", small, "acme-key"))
            time.sleep(0.1)
        assert "60 tokens per minute" in str(answers[-1][1]), answers
        assert second.stop() == 0
