"""Choices, log-probabilities, sampling options and cache hints on the whole stack, against `transformers`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch

from coppice_rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from tests.e2e.stack import Stack
from tests.fakes.api.client_calls import COMBINATIONS, ask, check
from tests.fakes.oracle import beams_of_transformers, model_of, random_tokens

BLOCK = 16
CLOSE = 2e-3  # fp32 on both sides


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return model_of(checkpoint)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Of every token but the first, by `transformers`."""
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [float(rows[place, token]) for place, token in enumerate(ids[1:])]


@pytest.mark.parametrize(("stream", "kind", "n", "logprobs"), COMBINATIONS)
def test_openai_in_every_combination(client: openai.OpenAI, stream: bool, kind: str, n: int, logprobs: bool) -> None:
    fields: Any = {"kind": kind, "n": n, "logprobs": logprobs, "seed": 5, "temperature": 0.8}
    answers, usage = ask(client, "tiny", stream=stream, **fields)
    check(answers, usage, n=n, logprobs=logprobs)
    again, _ = ask(client, "tiny", stream=not stream, **fields)
    assert [answer.text for answer in again] == [answer.text for answer in answers]
    assert again[0].logprobs == pytest.approx(answers[0].logprobs, abs=CLOSE)


def test_choices_are_the_ones_of_their_seeds(stack: Stack, client: openai.OpenAI) -> None:
    prompt = random_tokens(40, seed=3)
    options: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": 7}
    choices = client.completions.create(n=4, **options).choices
    assert choices[0].text == client.completions.create(**options).choices[0].text
    assert len({choice.text for choice in choices}) > 1
    greedy = client.completions.create(n=3, **{**options, "temperature": 0}).choices
    assert len({choice.text for choice in greedy}) == 1
    stack.wait_at_rest()


def test_a_scored_prompt_has_the_log_probabilities_of_transformers(client: openai.OpenAI, model: Any) -> None:
    ids = random_tokens(70, seed=4)
    for _ in range(2):  # the second time it is cached, and computed all the same
        scored = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        first, *rest = logprobs.token_logprobs
        assert first is None
        assert rest == pytest.approx(logprobs_of(model, ids), abs=CLOSE)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_prompt_logprobs_are_those_of_transformers(stack: Stack, model: Any) -> None:
    ids = random_tokens(70, seed=14)
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    fields: Any = {"prompt_logprobs": 3, "n": 2, "temperature": 1.0}
    for choice in stack.complete(ids, 2, **fields)["choices"]:
        start, *told = choice["prompt_logprobs"]
        assert start is None
        assert len(told) == len(ids) - 1
        for row, token_id, entry in zip(rows[:-1], ids[1:], told, strict=True):
            own = entry[str(token_id)]
            assert own["logprob"] == pytest.approx(float(row[token_id]), abs=CLOSE)
            # Nearly equal ones may stand in another order.
            assert int((row > row[token_id] + CLOSE).sum()) < own["rank"] <= int((row > row[token_id] - CLOSE).sum())
            best = sorted((each["logprob"] for each in entry.values() if each["rank"] <= 3), reverse=True)
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
    stack.wait_at_rest()


def test_the_best_of_many_is_the_likeliest_of_them(stack: Stack, model: Any) -> None:
    prompt = random_tokens(30, seed=15)
    fields: Any = {"temperature": 1.5, "seed": 3, "ignore_eos": True}

    def likelihood(choice: Any) -> float:
        told = logprobs_of(model, prompt + choice["token_ids"])[len(prompt) - 1 :]
        return sum(told) / len(told)

    every = stack.complete(prompt, 6, n=128, **fields)
    assert len({tuple(choice["token_ids"]) for choice in every["choices"]}) > 100
    best = stack.complete(prompt, 6, n=3, best_of=128, **fields)
    expected = sorted(every["choices"], key=likelihood, reverse=True)[:3]
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in expected]
    assert best["usage"]["completion_tokens"] == 6 * 128
    stack.wait_at_rest()


@pytest.mark.parametrize("length_penalty", [0.0, 1.5])
def test_a_beam_search_finds_what_transformers_finds(
    stack: Stack, model: Any, checkpoint: Path, length_penalty: float
) -> None:
    ends = sorted(load_checkpoint_text(checkpoint).eos_token_ids)
    for seed, stops in ((16, []), (17, [7, 99, 130, 201])):
        prompt = random_tokens(37, seed=seed)
        fields: Any = {"use_beam_search": True, "n": 3, "best_of": 5, "length_penalty": length_penalty}
        answer = stack.complete(prompt, 9, **fields, stop_token_ids=stops)
        limits: Any = {"max_tokens": 9, "length_penalty": length_penalty}
        expected, _ = beams_of_transformers(model, prompt, ends + stops, width=5, count=3, **limits)
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] > 9 * 3, "what the other beams sampled counts, too"
    stack.wait_at_rest()


def test_an_answer_has_the_log_probabilities_of_transformers(stack: Stack, model: Any) -> None:
    prompt = random_tokens(20, seed=5)
    choice = stack.complete(prompt, 10, logprobs=2)["choices"][0]
    ids = choice["token_ids"]
    expected = logprobs_of(model, prompt + ids)[len(prompt) - 1 :]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=CLOSE)
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    assert choice["logprobs"]["token_logprobs"] == best  # greedy: the chosen one is the likeliest


def test_sampling_options_change_what_is_chosen(stack: Stack) -> None:
    prompt = random_tokens(20, seed=6)

    def ids(**fields: Any) -> list[int]:
        found: list[int] = stack.complete(prompt, 8, **fields)["choices"][0]["token_ids"]
        return found

    plain = ids()
    assert ids(logit_bias={"77": 100}) == [77] * 8
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100})
    assert len(set(ids(logit_bias={"77": 20, "78": 19.5}, presence_penalty=2, frequency_penalty=2))) > 1
    assert ids(stop_token_ids=[plain[2]])[-1] == plain[2]
    longer = ids(stop_token_ids=[plain[2]], min_tokens=6)
    assert len(longer) >= 6
    assert plain[2] not in longer[:6]
    assert ids(temperature=1.0, seed=9, min_p=1.0) == plain  # only the likeliest is left


def test_usage_says_what_was_cached_and_written(stack: Stack) -> None:
    prompt = random_tokens(100, seed=7)
    first = stack.complete(prompt, 1, prompt_cache_key="k", prompt_cache_options={"ttl": "30m"})["usage"]
    second = stack.complete(prompt, 1)["usage"]
    whole = 100 // BLOCK * BLOCK
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": whole}
    assert second["prompt_tokens_details"] == {"cached_tokens": whole, "cache_write_tokens": 0}


def test_a_deadline_ends_a_request_by_name(stack: Stack) -> None:
    prompt = random_tokens(30, seed=8)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "timeout": 0.2}
    status, answer = stack.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) in ((504, "deadline_exceeded"), (429, "deadline"))
    stack.wait_at_rest()


def test_tokens_and_the_description_are_served(stack: Stack) -> None:
    status, found = stack.post("/tokenize", {"prompt": "hello there"})
    assert status == 200
    assert stack.post("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "hello there"})
    assert stack.get(f"{stack.url}/openapi.json")[1]["openapi"] == "3.1.0"


def test_grpc_has_choices_and_the_same_log_probabilities(stack: Stack) -> None:
    prompt = random_tokens(40, seed=9)
    expected = stack.complete(prompt, 6, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        request = scheduler_pb2.GenerateRequest(
            model="tiny",
            token_ids=scheduler_pb2.TokenIds(tokens=struct.pack(f"<{len(prompt)}I", *prompt)),
            max_tokens=6,
            temperature=0,
            ignore_eos=True,
            n=2,
            num_logprobs=1,
        )
        responses = list(scheduler_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60))
    for index in range(2):
        mine = [response for response in responses if response.index == index]
        found = [entry.logprob for response in mine for entry in response.logprobs]
        assert found == pytest.approx(expected, abs=CLOSE)
        assert mine[-1].finish_reason == "length"
