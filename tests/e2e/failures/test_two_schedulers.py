"""A second scheduler on the same cache service and worker, as real processes: who serves, and who serves again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Service, Stack, wait_until
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.ports import free_port


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


@pytest.mark.wide
def test_the_first_serves_again_by_itself_when_the_second_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    with Stack(checkpoint, tmp_path) as stack:
        assert status_of(stack, stack.port) == 200
        port = free_port()
        second = Service(
            "second",
            [sys.executable, "-m", "coppice_scheduler", f"--cache=127.0.0.1:{stack.cache_sessions}", f"--port={port}",
             f"--grpc-port={free_port()}", f"--model={checkpoint}", "--model-name=tiny", "--drain-s=2"],
            tmp_path / "second.log",
        )  # fmt: skip
        second.start()
        wait_until(lambda: status_of(stack, port) == 200, "the second scheduler serves")
        assert second.stop() == 0
        wait_until(lambda: status_of(stack, stack.port) == 200, "the first one serves again")
        stack.wait_at_rest()
        assert "plans no more" in (tmp_path / "scheduler.log").read_text()
