"""Whatever form is asked for, an answer that comes to its end has it: random forms, a model without sense."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from coppice import LLM, SamplingOptions
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fuzz.random_formats import random_choices, random_regex, whole_schema

MAX_TOKENS = 1_500
AT_ONCE = 25


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return LLM(folder, num_blocks=AT_ONCE * 128, threads=1, max_running=AT_ONCE)


def answers(llm: LLM, formats: Sequence[dict[str, Any]], seed: int) -> list[str]:
    """Each in one of these forms, whole."""
    options = [
        SamplingOptions(max_tokens=MAX_TOKENS, temperature=1.5, seed=seed + place, structured_outputs=wanted)
        for place, wanted in enumerate(formats)
    ]
    outputs = [each.outputs[0] for each in llm.generate(["x"] * len(formats), options, progress=False)]
    unfinished = [wanted for wanted, output in zip(formats, outputs, strict=True) if output.finish_reason != "stop"]
    assert not unfinished, "these came to no end"
    llm.check()
    return [output.text for output in outputs]


def check_schemas(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    schemas = [whole_schema(draw) for _ in range(AT_ONCE)]
    for schema, text in zip(schemas, answers(llm, [{"json": schema} for schema in schemas], seed), strict=True):
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        assert validator.is_valid(json.loads(text)), (schema, text)


def check_regexes(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    regexes = [random_regex(draw) for _ in range(AT_ONCE)]
    for regex, text in zip(regexes, answers(llm, [{"regex": regex} for regex in regexes], seed), strict=True):
        assert re.fullmatch(regex, text), (regex, text)
        assert re.fullmatch(regex, text, re.ASCII), (regex, text)


def check_choices(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    lists = [random_choices(draw) for _ in range(AT_ONCE)]
    for choices, text in zip(lists, answers(llm, [{"choice": choices} for choices in lists], seed), strict=True):
        assert text in choices


@pytest.mark.parametrize("check", [check_schemas, check_regexes, check_choices])
def test_answers_have_their_form(llm: LLM, check: Any) -> None:
    check(llm, 1)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(100, 108))
def test_answers_follow_their_schemas(llm: LLM, seed: int) -> None:
    check_schemas(llm, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1_000, 1_010))
@pytest.mark.parametrize("check", [check_schemas, check_regexes, check_choices])
def test_answers_have_their_form_for_long(llm: LLM, check: Any, seed: int) -> None:
    """2,000 of each."""
    for part in range(8):
        check(llm, 8 * seed + part)
