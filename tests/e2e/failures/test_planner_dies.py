"""kill -9 of the planner while it serves: no stream ends, and no token is another one."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from tests.e2e.stack import Stack
from tests.e2e.test_front_doors import children
from tests.fakes.oracle import Oracle
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide

NUM_STREAMS = 50
STEPS = "coppice_scheduler_steps_total"
NUM_TOKENS = 400


@pytest.fixture
def pair(checkpoint: Path, tmp_path: Path) -> Iterator[Stack]:
    arguments = ["--front-doors=2", "--max-queued=100"]
    with Stack(checkpoint, tmp_path, num_blocks=1024, num_workers=2, scheduler_args=arguments) as stack:
        stack.restore()
        yield stack


def planner_of(stack: Stack) -> int | None:
    """Its process id."""
    return next(iter(children(stack, "coppice_scheduler.edge.planner")), None)


def another(stack: Stack, lost: int) -> bool:
    """Whether there is another planner than this one, or will be none."""
    return not stack.services["scheduler"].is_running or planner_of(stack) not in (None, lost)


def kill_planner(stack: Stack) -> None:
    lost = planner_of(stack)
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: planner_of(stack) not in (None, lost), "another planner")


def ask(stack: Stack, number: int, **fields: Any) -> dict[str, Any]:
    """What a stream says, put together; or the answer of a call that does not stream."""
    body = {"model": "tiny", "prompt": [number * 7 % 90 + position for position in range(20)],
            "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    if not body.get("stream"):
        found = dict(json.loads(answer))
        assert "error" not in found, found
        return found
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert lines[-1:] == ["[DONE]"], lines[-1:]
    events = [json.loads(line) for line in lines[:-1]]
    assert not [event for event in events if "error" in event]
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "prompt": body["prompt"],
        "tokens": [token for choice in choices for token in choice["token_ids"] or ()],
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("token_logprobs", ())],
        "finish": choices[-1]["finish_reason"],
        "usage": next((event["usage"] for event in events if event.get("usage")), None),
    }


def all_kinds(stack: Stack) -> list[dict[str, Any]]:
    """Greedy, seeded, with log-probabilities, with stop strings, of several choices, whole."""
    kinds: list[dict[str, Any]] = [
        {"stream": True, "temperature": 0},
        {"stream": True, "temperature": 0.9, "seed": 5, "stream_options": {"include_usage": True}},
        {"stream": True, "temperature": 0, "logprobs": 2},
        {"stream": True, "temperature": 0.8, "seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"stream": False, "temperature": 0.7, "seed": 7, "n": 3},
        {"stream": True, "temperature": 0.7, "seed": 8, "stop": ["a" * 40]},
        {"stream": False, "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 24},
    ]
    with ThreadPoolExecutor(len(kinds)) as pool:
        return list(pool.map(lambda kind: ask(stack, kinds.index(kind), **kind), kinds))


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call: names, and what the worker that it came to had cached."""
    usage = {name: value for name, value in (answer["usage"] or {}).items() if name != "prompt_tokens_details"}
    return {**answer, "usage": usage, "id": None, "created": None}


def wait_steps(stack: Stack, count: float) -> None:
    wait_for(lambda: stack.metric(stack.port, STEPS) > count, "some steps")


def killed_while(stack: Stack, times: int) -> threading.Thread:
    """A planner dies as soon as its streams have something, so many times."""

    def kill() -> None:
        for _ in range(times):
            wait_steps(stack, stack.metric(stack.port, STEPS) + 5)
            kill_planner(stack)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_stream_ends_and_no_token_is_another(pair: Stack, oracle: Oracle, times: int) -> None:
    killing = killed_while(pair, times)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda n: ask(pair, n, stream=True, temperature=0), range(NUM_STREAMS)))
    killing.join()
    for answer in answers:
        assert (answer["finish"], len(answer["tokens"])) == ("length", NUM_TOKENS)
        oracle.check(answer["prompt"], answer["tokens"])
    assert pair.metric(pair.port, "coppice_requests_moved_total") > 0
    pair.wait_at_rest()


def test_whatever_is_asked_for_is_what_it_would_have_been(pair: Stack) -> None:
    all_kinds(pair)  # what is cached is the same for the two that follow
    expected = all_kinds(pair)
    killing = killed_while(pair, 1)
    found = all_kinds(pair)
    killing.join()
    for one, other in zip(found, expected, strict=True):
        assert told(one) == told(other)
    pair.wait_at_rest()


@pytest.mark.long
def test_a_stream_of_grpc_goes_on_as_well(pair: Stack) -> None:
    def generate() -> tuple[bytes, str]:
        with grpc.insecure_channel(f"127.0.0.1:{pair.grpc_port}") as channel:
            request = pb.GenerateRequest(model="tiny", text="hello", max_tokens=NUM_TOKENS, ignore_eos=True, seed=3)
            chunks = list(pb_grpc.GenerationStub(channel).Generate(request, timeout=120))
        return b"".join(chunk.tokens for chunk in chunks), chunks[-1].finish_reason

    expected = generate()
    killing = killed_while(pair, 1)
    assert generate() == expected
    killing.join()


@pytest.mark.long
def test_the_last_of_many_planners_is_not_followed_by_another(pair: Stack) -> None:
    """What dies again and again is not started for ever; the scheduler ends, and says why."""
    scheduler = pair.services["scheduler"]
    for _ in range(6):
        wait_for(lambda: pair.get(f"{pair.url}/readyz")[0] == 200 or not scheduler.is_running, "it to plan")
        lost = planner_of(pair)
        if lost is None:
            break
        os.kill(lost, signal.SIGKILL)
        wait_for(partial(another, pair, lost), "its end")
    wait_for(lambda: not scheduler.is_running, "the end of the scheduler")
    assert scheduler.process is not None
    assert scheduler.process.returncode == 1
    assert "the planner ended (killed by SIGKILL)" in scheduler.log.read_text()
