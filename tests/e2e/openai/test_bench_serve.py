"""A load as `vllm bench serve` sends it: many streams at once, each with as many tokens as it asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack
from tests.fakes.api.load_client import LoadAnswer, LoadRequest, send_all
from tests.fakes.waiting import WAIT_S

pytestmark = pytest.mark.wide

PATHS = ("/v1/completions", "/v1/chat/completions")
NUM_REQUESTS = 60  # of each path
GREEDY = {"temperature": 0}  # `--temperature 0`, which goes into the body as every other option of sampling
MORE = {"top_p": 0.9, "top_k": 20, "min_p": 0.0, "temperature": 0.8, "frequency_penalty": 0.1, "presence_penalty": 0.1}


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Most requests wait."""
    folder = tmp_path_factory.mktemp("stack")
    with Stack(checkpoint, folder, num_blocks=256, scheduler_args=["--max-running=8"]) as stack:
        yield stack


def load(seed: int, **fields: Any) -> list[LoadRequest]:
    """Some prompts begin alike; some ask for one token."""
    rng = random.Random(seed)
    words = [f"{rng.choice('bdfgklmn')}{rng.choice('aeiou')}{rng.choice('rstv')}" for _ in range(40)]
    shared = " ".join(rng.choices(words, k=10))
    requests = []
    for number in range(len(PATHS) * NUM_REQUESTS):
        own = " ".join(rng.choices(words, k=rng.randrange(1, 12)))
        prompt = f"{shared} {own}" if number % 3 else own
        path, num_tokens = PATHS[number % len(PATHS)], rng.choice([1, 2, 7, 20, 33])
        requests.append(LoadRequest(path, prompt, num_tokens, f"bench-{seed}-{number}", fields))
    return requests


def alone(stack: Stack, request: LoadRequest) -> Any:
    """What the same request gets whole."""
    body = {**request.body("tiny"), "stream": False}
    del body["stream_options"]
    status, answer = stack.post(request.path, body)
    assert status == 200, answer
    return answer


def check(requests: list[LoadRequest], answers: list[LoadAnswer]) -> None:
    for request, answer in zip(requests, answers, strict=True):
        assert answer.status == 200
        assert answer.request_id == request.request_id
        assert answer.num_output_tokens == request.num_tokens
        assert answer.num_prompt_tokens
        assert answer.num_chunks, "a time to the first token is measured"
        assert answer.is_done


def test_every_stream_has_as_many_tokens_as_it_asked_for(stack: Stack) -> None:
    requests = load(1, **GREEDY)
    answers = send_all(stack.url, "tiny", requests, WAIT_S)
    check(requests, answers)
    for request, answer in list(zip(requests, answers, strict=True))[:8]:
        whole = alone(stack, request)
        choice = whole["choices"][0]
        assert answer.text == (choice["message"]["content"] if request.is_chat else choice["text"])
        assert answer.num_prompt_tokens == whole["usage"]["prompt_tokens"]
    stack.wait_at_rest()


def test_options_of_sampling_are_taken(stack: Stack) -> None:
    requests = load(2, **MORE)
    check(requests, send_all(stack.url, "tiny", requests, WAIT_S))
    stack.wait_at_rest()


def test_what_it_asks_before_a_load_is_there(stack: Stack) -> None:
    status, models = stack.get(f"{stack.url}/v1/models")
    assert (status, models["data"][0]["id"]) == (200, "tiny")
    assert stack.get(f"{stack.url}/health")[0] == 200
