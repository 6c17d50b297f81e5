"""`instructor`: what it reads out of our answers is of the model that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def answers(ask: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return ask("instructor_asks")


def is_city(found: Any) -> bool:
    return set(found) == {"name", "day"} and found["name"].istitle() and found["day"] in ("today", "tomorrow")


@pytest.mark.parametrize("mode", ["tools", "tools_strict", "json_schema", "by_name_of_the_provider"])
def test_answers_are_of_the_model_that_was_asked_for(answers: dict[str, Any], mode: str) -> None:
    assert is_city(answers[mode]), answers[mode]


@pytest.mark.parametrize("mode", ["tools", "tools_strict", "json_schema"])
def test_lists_are_of_the_model_that_was_asked_for(answers: dict[str, Any], mode: str) -> None:
    lists = answers[f"{mode}_in_a_list"]
    assert isinstance(lists, list), lists
    assert all(is_city(each) for found in lists for each in found)
    assert max(map(len, lists)) > 1


def test_entries_of_a_list_come_one_by_one_and_are_those_of_the_list(answers: dict[str, Any]) -> None:
    both = answers["tools_one_by_one"]
    assert len(both) > 1
    for whole, one_by_one in both:
        assert one_by_one == whole


def test_json_is_any_object(answers: dict[str, Any]) -> None:
    assert answers["json"] == {"name": "nobody"}


@pytest.mark.parametrize("mode", ["tools_in_parts", "json_schema_in_parts"])
def test_parts_grow_to_the_whole(answers: dict[str, Any], mode: str) -> None:
    parts = answers[mode]
    assert isinstance(parts, list), parts
    assert is_city(parts[-1])
    assert any(part["day"] is None for part in parts), "it came in parts"


def test_usage_comes_with_the_answer(answers: dict[str, Any]) -> None:
    found, num_tokens = answers["with_usage"]
    assert is_city(found)
    assert num_tokens > 10


def test_a_call_that_will_not_do_is_sent_back_and_asked_again(answers: dict[str, Any]) -> None:
    found, num_asked = answers["a_validator_asks_again"]
    assert is_city(found)
    assert num_asked == 2
