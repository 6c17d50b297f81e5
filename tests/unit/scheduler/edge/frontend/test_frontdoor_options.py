"""Seeds of choices, packed options, and texts of single tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TextPrompt
from coppice_scheduler.edge.frontend.sampling_options import sampling_of, seed_of_choice
from coppice_scheduler.edge.text.checkpoint_text import SamplingDefaults
from coppice_scheduler.edge.text.detokenizer import TokenTexts
from tests.unit.scheduler.edge.frontend.test_frontdoor_text import TOKENIZERS

SPEC = GenerationSpec("m", (TextPrompt("x"),))


def test_seeds_of_choices_are_far_apart_and_the_first_is_the_given_one() -> None:
    for seed in (0, 1, 2**64 - 1):
        seeds = [seed_of_choice(seed, index) for index in range(8)]
        assert seeds[0] == seed
        assert all(0 <= other < 2**64 for other in seeds)
        assert len({other >> 32 for other in seeds}) == 8
    neighbours = {seed_of_choice(seed, index) for seed in range(100) for index in range(1, 8)}
    assert len(neighbours) == 700
    bits = np.array([bin(seed_of_choice(seed, 1) ^ seed_of_choice(seed + 1, 1)).count("1") for seed in range(500)])
    assert 28 < bits.mean() < 36


def test_min_tokens_names_the_tokens_that_must_wait() -> None:
    sampling = sampling_of(replace(SPEC, min_tokens=2, stop_token_ids=(9,)), SamplingDefaults(), {3, 300}, 500)
    assert np.frombuffer(sampling.stop_token_ids, "<u4").tolist() == [3, 9, 300]
    deaf = sampling_of(replace(SPEC, min_tokens=2, ignore_eos=True), SamplingDefaults(), {3}, 500)
    assert deaf.stop_token_ids == b""
    assert sampling_of(SPEC, SamplingDefaults(), {3}, 500).stop_token_ids == b""


def test_numbers_that_are_none_are_in_no_range() -> None:
    nan = float("nan")
    for field in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        with pytest.raises(ApiError) as caught:
            sampling_of(replace(SPEC, **{field: nan}), SamplingDefaults(), (), 500)  # type: ignore[arg-type]
        assert caught.value.param == field
    with pytest.raises(ApiError):
        sampling_of(replace(SPEC, logit_bias={1: nan}), SamplingDefaults(), (), 500)


def test_a_token_by_itself_keeps_its_space_and_its_bytes() -> None:
    raw = TOKENIZERS["sentencepiece-like"]
    texts = TokenTexts(raw)
    assert texts.text_of(raw.token_to_id("▁forest")) == " forest"
    assert texts.text_of(raw.token_to_id("s")) == "s"
    assert texts.bytes_of(3 + 0xE6) == b"\xe6"
    assert texts.text_of(3 + 0xE6) == "�"
    assert texts.text_of(1) == "<s>"
    assert texts.bytes_of(10**6) == b""
    byte_level = TokenTexts(TOKENIZERS["byte-level"])
    assert byte_level.text_of(0) == "<|endoftext|>"
    ids = TOKENIZERS["byte-level"].encode("東京 ok").ids
    assert b"".join(map(byte_level.bytes_of, ids)).decode() == "東京 ok"
