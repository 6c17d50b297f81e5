"""Two schedulers whose front doors reach each other's planners, as real processes: what ends when planners die."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.failures.test_planner_dies import ask
from tests.e2e.failures.test_several_planners import MOVED, check_exact
from tests.e2e.failures.test_two_schedulers import readiness
from tests.e2e.stack import Service, Stack
from tests.e2e.test_front_doors import children
from tests.fakes.certificates import Authority
from tests.fakes.oracle import Oracle
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide

NUM_STREAMS = 12
OTHER = "second"  # the second scheduler among the services


@dataclass
class Pair:
    """One is the stack's own; the second has its front doors at `port`."""

    stack: Stack
    port: int

    @property
    def second(self) -> Service:
        return self.stack.services[OTHER]

    def planners(self, name: str) -> list[int]:
        """Process ids of the planners of a scheduler."""
        stack_scheduler = self.stack.services["scheduler"]
        self.stack.services["scheduler"] = self.stack.services[name]
        try:
            return children(self.stack, "coppice_scheduler.edge.planner")
        finally:
            self.stack.services["scheduler"] = stack_scheduler


@contextmanager
def pair_of_schedulers(checkpoint: Path, folder: Path, num_workers: int = 2, tls: bool = False) -> Iterator[Pair]:
    ports = free_port(), free_port()
    flags: dict[str, list[str]] = {name: [] for name in ("cache", "worker", "scheduler")}
    if tls:
        (folder / "tls").mkdir()
        authority = Authority(folder / "tls")
        flags = {"cache": authority.flags("cache", "cache"), "worker": authority.flags("worker", "worker-0"),
                 "scheduler": authority.flags("scheduler", "scheduler")}  # fmt: skip
    both = f"--planner-peers={','.join(f'localhost:{port}' for port in ports)}"
    of_a = ["--max-queued=100", f"--planner-port={ports[0]}", both, *flags["scheduler"]]
    stack = Stack(checkpoint, folder, num_blocks=1024, num_workers=num_workers, scheduler_args=of_a,
                  cache_args=flags["cache"], worker_args=flags["worker"])  # fmt: skip
    with stack:
        port = free_port()
        argv = [sys.executable, "-m", "coppice_scheduler", f"--cache=127.0.0.1:{stack.cache_sessions}",
                f"--port={port}", f"--grpc-port={free_port()}", f"--model={checkpoint}", "--model-name=tiny", both,
                "--drain-s=30", f"--planner-port={ports[1]}", "--max-queued=100", *flags["scheduler"]]  # fmt: skip
        stack.services[OTHER] = Service(OTHER, argv, folder / "second.log")
        stack.services[OTHER].start()
        wait_for(lambda: readiness(port)[0] == 200, "the second scheduler to serve")
        yield Pair(stack, port)


def streams(stack: Stack) -> Iterator[dict[str, Any]]:
    def one(number: int) -> dict[str, Any]:
        return ask(stack, number, stream=True, temperature=0)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield from pool.map(one, range(NUM_STREAMS))


def wait_under_way(stack: Stack) -> None:
    name = "coppice_worker_tokens_computed_total"
    before = sum(stack.metric(port, name) for port in stack.worker_http)
    wait_for(lambda: sum(stack.metric(port, name) for port in stack.worker_http) > before + 500, "some steps")


def test_streams_of_a_scheduler_without_planners_go_on_at_the_other(
    checkpoint: Path, tmp_path: Path, oracle: Oracle
) -> None:
    with pair_of_schedulers(checkpoint, tmp_path) as pair, ThreadPoolExecutor(1) as aside:
        stack, first = pair.stack, pair.stack.services["scheduler"]
        wait_for(lambda: len(set(owners(stack))) == 2, "a worker for each")
        answers = aside.submit(lambda: list(streams(stack)))
        wait_under_way(stack)
        first.signal(signal.SIGSTOP)  # it starts no other planner
        try:
            for planner in pair.planners("scheduler"):
                os.kill(planner, signal.SIGKILL)
            check_exact(answers.result(), oracle)
            assert stack.metric(stack.port, MOVED) > 0
            assert readiness(stack.port)[0] == 200
            assert stack.complete([5, 6, 7], 3)["choices"]
        finally:
            first.signal(signal.SIGCONT)
        wait_for(lambda: len(pair.planners("scheduler")) == 1, "another planner")
        wait_for(lambda: len(set(owners(stack))) == 2, "a worker for each")
        stack.wait_at_rest()


def owners(stack: Stack) -> list[int]:
    """Epochs of the planners that have workers."""
    return [worker["owner"] for worker in stack.cache_stats()["workers"] if worker["owner"]]


def test_what_one_scheduler_has_cached_the_other_finds_with_and_without_a_worker_of_its_own(
    checkpoint: Path, tmp_path: Path
) -> None:
    """With one worker one of them has no planner that could serve, and is ready all the same."""
    with pair_of_schedulers(checkpoint, tmp_path, num_workers=1, tls=True) as pair:
        stack = pair.stack
        prompt = [position * 7 % 90 for position in range(320)]
        cached = []
        for port in (stack.port, pair.port, stack.port):
            assert readiness(port)[0] == 200
            own, stack.port = stack.port, port
            cached.append(stack.complete(prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"])
            stack.port = own
        assert cached == [0, 319, 319], "all but the last token"


@pytest.mark.long
def test_a_scheduler_whose_planner_dies_again_and_again_keeps_its_streams(
    checkpoint: Path, tmp_path: Path, oracle: Oracle
) -> None:
    with pair_of_schedulers(checkpoint, tmp_path) as pair, ThreadPoolExecutor(1) as aside:
        stack = pair.stack
        for _ in range(7):
            wait_for(lambda: bool(pair.planners("scheduler")) or is_down(stack), "a planner")
            if is_down(stack):
                break
            answers = aside.submit(lambda: list(streams(stack)))
            wait_under_way(stack)
            for planner in pair.planners("scheduler"):
                os.kill(planner, signal.SIGKILL)
            check_exact(answers.result(), oracle)
        assert is_down(stack)
        check_exact(list(streams(stack)), oracle)


def is_down(stack: Stack) -> bool:
    return "too often; it is started again later" in stack.services["scheduler"].log.read_text()


@pytest.mark.long
def test_a_scheduler_that_ends_waits_for_its_streams_at_the_other(
    checkpoint: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """The first has the only worker; the second serves by it."""
    with pair_of_schedulers(checkpoint, tmp_path, num_workers=1) as pair, ThreadPoolExecutor(1) as aside:
        stack = pair.stack
        at_second = copy(stack)
        at_second.port = pair.port
        answers = aside.submit(lambda: list(streams(at_second)))
        wait_under_way(stack)
        pair.second.signal(signal.SIGTERM)
        wait_for(lambda: readiness(pair.port)[0] != 200, "it to take nothing new")
        assert not answers.done()
        assert pair.second.stop() == 0
        check_exact(answers.result(), oracle)
