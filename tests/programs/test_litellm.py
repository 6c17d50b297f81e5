"""`litellm` as a client of both APIs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.programs
PROVIDERS = ("openai", "hosted_vllm", "anthropic")


@pytest.fixture(scope="module")
def answers(ask: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return ask("litellm_asks")


def is_city(text: str) -> bool:
    """What is beside the two properties is that of the provider `hosted_vllm`: it lets more in."""
    found = json.loads(text)
    return {"name", "day"} <= set(found) and found["name"].istitle() and found["day"] in ("today", "tomorrow")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_text_whole_and_streamed(answers: dict[str, Any], provider: str) -> None:
    found = answers["whole_and_streamed"]
    assert provider in found, found
    answer = found[provider]
    assert answer["whole"] == answer["streamed"] != ""
    assert answer["reasons"] == ["length", "length"]
    assert answer["usage"][1] == 20


@pytest.mark.parametrize("provider", PROVIDERS)
def test_calls_whole_and_streamed(answers: dict[str, Any], provider: str) -> None:
    found = answers["tools_whole_and_streamed"]
    assert provider in found, found
    for calls in (*found[provider], answers["a_named_tool"][provider]):
        ((name, arguments),) = calls
        assert name == "City"
        assert is_city(arguments)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_agent_sends_back_what_it_got_and_finds_it_cached(answers: dict[str, Any], provider: str) -> None:
    found = answers["an_agent"]
    assert provider in found, found
    before = 0
    for num_prompt, num_cached in found[provider]:
        assert num_cached >= before // 16 * 16
        assert num_prompt > before
        before = num_prompt


@pytest.mark.parametrize("provider", PROVIDERS)
def test_answers_have_the_form(answers: dict[str, Any], provider: str) -> None:
    found = answers["a_form"]
    assert provider in found, found
    assert is_city(found[provider])
    assert len(json.loads(found[provider])) == 2


@pytest.mark.parametrize("provider", PROVIDERS)
def test_refusals_are_understood(answers: dict[str, Any], provider: str) -> None:
    kind, words = answers["refusals"][provider]
    assert kind in ("BadRequestError", "ContextWindowExceededError")
    assert "2048" in words


def test_options_reach_us(answers: dict[str, Any]) -> None:
    for num_choices, num_logprobs in answers["options_of_openai"]:
        assert num_choices == 2
        assert num_logprobs > 0


def test_completions_and_responses(answers: dict[str, Any]) -> None:
    num_choices, num_tokens, last = answers["completions_and_responses"]
    assert (num_choices, num_tokens) == (1, 5)
    assert last in ("response.incomplete", "response.completed")
