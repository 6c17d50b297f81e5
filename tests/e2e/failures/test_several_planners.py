"""Two planners, two workers, two front doors: kill -9 of each kind of process under load ends no stream."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.failures.test_planner_dies import NUM_STREAMS, NUM_TOKENS, all_kinds, ask, told
from tests.e2e.stack import Stack
from tests.e2e.test_front_doors import children
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide

COMPUTED = "coppice_worker_tokens_computed_total"
MOVED = "coppice_requests_moved_total"


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    arguments = ["--front-doors=2", "--max-queued=100", "--planners=2"]
    folder = tmp_path_factory.mktemp("planners")
    with Stack(checkpoint, folder, num_blocks=1024, num_workers=2, scheduler_args=arguments) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """Each planner has a worker."""
    running.restore()
    wait_for(lambda: len(planners_of(running)) == 2, "both planners")
    wait_for(lambda: len(owners(running)) == 2, "a worker for each")
    return running


def planners_of(stack: Stack) -> list[int]:
    """Their process ids."""
    return children(stack, "coppice_scheduler.edge.planner")


def owners(stack: Stack) -> set[int]:
    """Epochs of the planners that have workers."""
    return {worker["owner"] for worker in stack.cache_stats()["workers"] if worker["owner"]}


def all_streams(stack: Stack, kind: int = 0) -> Iterator[dict[str, Any]]:
    """Of fifty prompts, at once. Each kind has others: a prompt under which two workers were lost is not served."""

    def one(number: int) -> dict[str, Any]:
        prompt = [kind, *(number * 7 % 90 + position for position in range(20))]
        return ask(stack, number, stream=True, temperature=0, prompt=prompt)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield from pool.map(one, range(NUM_STREAMS))


def wait_under_way(stack: Stack) -> None:
    computed = [stack.metric(port, COMPUTED) for port in stack.worker_http]
    wait_for(
        lambda: sum(stack.metric(port, COMPUTED) for port in stack.worker_http) > sum(computed) + 1_000, "some steps"
    )


def kill(planner: int) -> None:
    os.kill(planner, signal.SIGKILL)


def check_exact(answers: list[dict[str, Any]], oracle: Oracle) -> None:
    for answer in answers:
        assert (answer["finish"], len(answer["tokens"])) == ("length", NUM_TOKENS)
        oracle.check(answer["prompt"], answer["tokens"])


def test_no_stream_ends_when_one_planner_dies_and_then_the_other(stack: Stack, oracle: Oracle) -> None:
    with ThreadPoolExecutor(1) as aside:
        answers = aside.submit(lambda: list(all_streams(stack)))
        for planner in planners_of(stack):
            wait_under_way(stack)
            kill(planner)
        check_exact(answers.result(), oracle)
    assert stack.metric(stack.port, MOVED) > 0
    stack.wait_at_rest()


def test_what_a_planner_has_cached_is_found_again_by_any_front_door(stack: Stack) -> None:
    """Each prompt is asked for three times; either front door may take it, and either worker may have it."""
    numbers = iter(range(90))

    def cached() -> list[int]:
        """Of another prompt each time."""
        number = next(numbers)
        prompt = [(number + position * 7) % 90 for position in range(320)]
        usages = [stack.complete(prompt, 1)["usage"] for _ in range(3)]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]

    stack.forget()
    before = [stack.metric(port, COMPUTED) for port in stack.worker_http]

    def both_are_chosen() -> bool:
        """A planner that has lost its worker is not, for a second."""
        cached()
        return all(stack.metric(port, COMPUTED) > count for port, count in zip(stack.worker_http, before, strict=True))

    wait_for(both_are_chosen, "both to be chosen")
    found = [cached() for _ in range(12)]
    assert [first for first, *_ in found] == [0] * 12
    # By load alone half of them would be found. One or two may be missed, where a planner has much to do just then.
    assert sum(count == 319 for _, *again in found for count in again) >= 21, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "service", "comes_back"), [(1, "worker-1", True), (2, "worker-1", False), (3, "cache", True)]
)
def test_no_stream_ends_when_another_process_dies(
    stack: Stack, oracle: Oracle, kind: int, service: str, comes_back: bool
) -> None:
    with ThreadPoolExecutor(1) as aside:
        answers = aside.submit(lambda: list(all_streams(stack, kind)))
        wait_under_way(stack)
        stack.services[service].kill()
        if comes_back:
            stack.services[service].start()
        check_exact(answers.result(), oracle)
    stack.restore()


@pytest.mark.long
def test_whatever_is_asked_for_is_what_it_would_have_been(stack: Stack) -> None:
    all_kinds(stack)  # what is cached is the same for the two that follow
    expected = all_kinds(stack)
    with ThreadPoolExecutor(1) as aside:
        found = aside.submit(all_kinds, stack)
        wait_under_way(stack)
        kill(planners_of(stack)[0])
    for one, other in zip(found.result(), expected, strict=True):
        assert told(one) == told(other)
    stack.wait_at_rest()


@pytest.mark.long
def test_more_planners_than_workers_stand_by_and_take_over(checkpoint: Path, tmp_path: Path, oracle: Oracle) -> None:
    with Stack(checkpoint, tmp_path, num_blocks=1024, scheduler_args=["--planners=3", "--max-queued=100"]) as stack:
        with ThreadPoolExecutor(1) as aside:
            answers = aside.submit(lambda: list(all_streams(stack)))
            for planner in planners_of(stack):
                wait_under_way(stack)
                kill(planner)
            check_exact(answers.result(), oracle)
        stack.wait_at_rest()
