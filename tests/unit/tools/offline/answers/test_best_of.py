"""`best_of` of `coppice.LLM`: the likeliest, by `transformers`, of the candidates that `n` would have told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coppice import LLM, Completion, Generation, SamplingOptions
from tests.fakes.oracle import model_of

PROMPT = "a prompt that is longer than a block or two of sixteen tokens"
CHAT = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return model_of(checkpoint)


def mean_logprob(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> float:
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return sum(float(rows[len(prompt) - 1 + place, token]) for place, token in enumerate(ids)) / len(ids)


def told(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason, completion.logprobs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"n": 2, "logprobs": 2},
        {"n": 2, "stop": ["e", "a", " "]},
        {"stop_token_ids": [*range(90, 120)], "ignore_eos": False},
    ],
    ids=lambda options: ", ".join(options) or "one",
)
def test_the_best_are_the_likeliest_of_all_candidates(
    llm: LLM, model: torch.nn.Module, options: dict[str, Any]
) -> None:
    fields = {"max_tokens": 12, "temperature": 1.5, "seed": 7, "ignore_eos": True, **options}
    (every,) = llm.generate(PROMPT, SamplingOptions(**{**fields, "n": 24}))
    (best,) = llm.generate(PROMPT, SamplingOptions(**fields, best_of=24))
    likelihood = {
        output.index: mean_logprob(model, every.prompt_token_ids, output.token_ids) for output in every.outputs
    }
    expected = sorted(every.outputs, key=lambda output: -likelihood[output.index])[: fields.get("n", 1)]
    assert [told(output) for output in best.outputs] == [told(output) for output in expected]
    assert [output.index for output in best.outputs] == [*range(len(expected))]
    scores = [output.score for output in best.outputs]
    assert scores == pytest.approx([likelihood[output.index] for output in expected], abs=1e-3)
    assert {output.score for output in every.outputs} == {None}
    llm.check()


def test_as_many_candidates_as_answers_are_in_their_own_order(llm: LLM) -> None:
    options: dict[str, Any] = {"n": 6, "max_tokens": 8, "temperature": 1.5, "seed": 3}
    (plain,), (same,) = (llm.generate(PROMPT, SamplingOptions(**options, best_of=many)) for many in (None, 6))
    assert [told(output) for output in same.outputs] == [told(output) for output in plain.outputs]
    assert {output.score for output in same.outputs} == {None}


def test_several_prompts_have_their_own_best(llm: LLM) -> None:
    options = [
        SamplingOptions(n=number, best_of=5, max_tokens=6, temperature=1.0, seed=number, ignore_eos=True)
        for number in (1, 2, 5)
    ]
    together = llm.generate(["one", "two", "three"], options)
    assert [len(generation.outputs) for generation in together] == [1, 2, 5]
    for prompt, each, generation in zip(["one", "two", "three"], options, together, strict=True):
        assert tokens(llm.generate(prompt, each)[0]) == tokens(generation)


def tokens(generation: Generation) -> list[list[int]]:
    return [output.token_ids for output in generation.outputs]


def test_what_is_told_of_the_prompt_is_that_of_the_prompt(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 1.5, "seed": 5, "prompt_logprobs": True}
    fresh = "a prompt of more than one block of sixteen tokens, which nobody has sent before"
    (best,) = llm.generate(fresh, SamplingOptions(**fields, best_of=16))
    (plain,) = llm.generate(fresh, SamplingOptions(**fields))
    assert best.token_ids != plain.token_ids, "the best is not the first candidate"
    assert best.usage.prompt_tokens == plain.usage.prompt_tokens
    assert best.usage.cached_tokens == 0
    assert best.prompt_logprobs is not None
    assert plain.prompt_logprobs is not None
    assert [each.token_id for each in best.prompt_logprobs] == [each.token_id for each in plain.prompt_logprobs]


def test_a_chat_has_its_best_answer_too(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "seed": 5, "ignore_eos": True}
    (every,) = llm.chat(CHAT, SamplingOptions(**fields, n=16, logprobs=0))
    (best,) = llm.chat(CHAT, SamplingOptions(**fields, best_of=16))

    def likelihood(output: Completion) -> float:
        assert output.logprobs is not None
        return sum(each.logprob for each in output.logprobs) / len(output.logprobs)

    assert best.token_ids == max(every.outputs, key=likelihood).token_ids
    assert best.outputs[0].logprobs is None
