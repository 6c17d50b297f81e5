"""Log-probabilities of `coppice.LLM` are those that `transformers` computes, of outputs and of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coppice import LLM, SamplingOptions
from coppice_offline.interface.results import TokenLogprob
from tests.fakes.oracle import model_of

PROMPT = "a prompt that is longer than a block or two of sixteen tokens"
OPTIONS = SamplingOptions(max_tokens=10, seed=4, temperature=0.8, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return model_of(checkpoint)


def check(model: torch.nn.Module, ids: list[int], first: int, found: list[TokenLogprob], num_top: int) -> None:
    """`found` is about the tokens of `ids` from position `first` on."""
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert [each.token_id for each in found] == ids[first:]
    for place, each in enumerate(found, start=first - 1):
        assert each.logprob == pytest.approx(float(expected[place, each.token_id]), abs=1e-3)
        best = expected[place].topk(num_top)
        assert list(each.top.values()) == pytest.approx(best.values.tolist(), abs=1e-3)
        if num_top:
            assert next(iter(each.top)) == int(best.indices[0])


def test_of_outputs(llm: LLM, model: torch.nn.Module) -> None:
    (generation,) = llm.generate(PROMPT, OPTIONS)
    found = generation.outputs[0].logprobs
    assert found is not None
    ids = generation.prompt_token_ids
    check(model, ids + generation.token_ids, len(ids), found, num_top=3)
    assert generation.prompt_logprobs is None


def test_of_outputs_that_a_stop_text_cut(llm: LLM, model: torch.nn.Module) -> None:
    stop = llm.generate(PROMPT, OPTIONS)[0].text[3:5]
    options = SamplingOptions(max_tokens=10, seed=4, temperature=0.8, ignore_eos=True, logprobs=0, stop=stop)
    (generation,) = llm.generate(PROMPT, options)
    found = generation.outputs[0].logprobs
    assert found is not None
    assert len(found) == len(generation.token_ids) < 10
    check(model, generation.prompt_token_ids + generation.token_ids, len(generation.prompt_token_ids), found, 0)


def test_of_prompts_even_where_they_are_cached(llm: LLM, model: torch.nn.Module) -> None:
    options = SamplingOptions(max_tokens=2, n=2, temperature=0, logprobs=1, prompt_logprobs=True)
    for _ in range(2):
        (generation,) = llm.generate(PROMPT, options)
        assert generation.prompt_logprobs is not None
        check(model, generation.prompt_token_ids, 1, generation.prompt_logprobs, num_top=1)


def test_none_where_none_were_asked_for(llm: LLM) -> None:
    assert llm.generate(PROMPT, SamplingOptions(max_tokens=2))[0].outputs[0].logprobs is None
