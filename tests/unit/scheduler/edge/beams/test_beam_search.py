"""The search itself, beside `transformers`, and what the pure core promises whatever it is told."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coppice_scheduler.edge.beams.search import BeamOptions, BeamSearch, Finished, Likely
from coppice_scheduler.edge.text.tokenizer import unpack_tokens
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import PAD, beams_of_transformers, model_of

CLOSE = 1e-4
PROMPT = [5, 80, 200, 31]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=3)
    return model_of(folder)


def ours(model: Any, prompt: list[int], options: BeamOptions) -> list[Finished]:
    search = BeamSearch(options)
    while not search.is_done:
        told = []
        for beam in search.beams:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + unpack_tokens(beam.tokens)])).logits[0, -1].float()
            top = torch.log_softmax(logits, -1).topk(search.num_likely)
            told.append(Likely(top.indices.numpy().astype(np.uint32), top.values.numpy()))
        search.take(told)
    return search.best(options.width)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(("width", "num_ends"), [(2, 0), (3, 1), (4, 2), (5, 12)])
def test_answers_and_scores_are_those_of_transformers(
    model: Any, width: int, num_ends: int, length_penalty: float
) -> None:
    rng = random.Random(f"{width} {num_ends} {length_penalty}")
    for _ in range(3):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(2, 9))]
        with torch.inference_mode():
            likely = model(torch.tensor([prompt])).logits[0, -1].topk(4 * num_ends + 1).indices.tolist()
        ends, max_tokens = likely[1::4][:num_ends], rng.randrange(1, 12)
        found = ours(model, prompt, BeamOptions(width, length_penalty, max_tokens, frozenset(ends)))
        limits: Any = {"max_tokens": max_tokens, "length_penalty": length_penalty}
        rows, scores = beams_of_transformers(model, prompt, ends, width=width, count=width, **limits)
        for answer, row, score in zip(found, rows, scores, strict=True):
            told = unpack_tokens(answer.tokens) + ([answer.stop_token] if answer.stop_token is not None else [])
            assert told == row
            assert answer.score == pytest.approx(score, abs=CLOSE)


def test_one_beam_is_greedy(model: Any) -> None:
    (answer,) = ours(model, PROMPT, BeamOptions(1, 1.0, 10, frozenset()))
    greedy = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    assert unpack_tokens(answer.tokens) == greedy[0, len(PROMPT) :].tolist()


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sets(st.integers(0, 11), max_size=3),
    st.floats(-3, 3),
    st.randoms(use_true_random=False),
)
def test_it_ends_with_as_many_answers_as_beams(
    width: int, max_tokens: int, ends: set[int], length_penalty: float, rng: random.Random
) -> None:
    search = BeamSearch(BeamOptions(width, length_penalty, max_tokens, ends))
    vocabulary = max(40, search.num_likely)
    for step in range(max_tokens):
        assert 1 <= len(search.beams) <= width
        assert len({beam.tokens for beam in search.beams}) == len(search.beams)
        assert all(len(unpack_tokens(beam.tokens)) == step for beam in search.beams)
        told = []
        for _ in search.beams:
            weights = [rng.random() ** 4 + 1e-9 for _ in range(vocabulary)]
            total = sum(weights)
            row = sorted(range(vocabulary), key=lambda token: -weights[token])[: search.num_likely]
            logprobs = [math.log(weights[token] / total) for token in row]
            told.append(Likely(np.array(row, np.uint32), np.array(logprobs, np.float32)))
        search.take(told)
        if search.is_done:
            break
    assert search.is_done
    best = search.best(width)
    assert len(best) == width
    assert [answer.score for answer in best] == sorted((answer.score for answer in best), reverse=True)
    for answer in best:
        tokens = unpack_tokens(answer.tokens)
        assert not ends & set(tokens[:-1])
        assert (answer.stop_token in ends) if answer.stop_token is not None else len(tokens) == max_tokens


def test_those_that_are_as_likely_go_on_in_the_order_of_beams_and_tokens() -> None:
    search = BeamSearch(BeamOptions(2, 1.0, 3, frozenset()))
    search.take([Likely(np.array([9, 3, 5, 7], np.uint32), np.array([-1, -1, -1, -1], np.float32))])
    assert [unpack_tokens(beam.tokens) for beam in search.beams] == [[3], [5]]
    same = Likely(np.array([8, 2], np.uint32), np.array([-1, -1], np.float32))
    search.take([same, same])
    assert [unpack_tokens(beam.tokens) for beam in search.beams] == [[3, 2], [3, 8]]
