"""Answers are not kept between requests: what would need that is refused with what to send instead, which works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coppice_scheduler.edge.http.field_table import UnknownFields
from tests.contract.anthropic.test_messages import THINKER, THOUGHT, with_template
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import unpack
from tests.fakes.api.rest import MODEL, Served, error_of, serving

__all__ = ["served", "shared_server"]

STORED: list[tuple[str, Any, str]] = [
    ("previous_response_id", "resp_1", "send the whole conversation as input instead"),
    ("previous_response_id", 5, "send the whole conversation as input instead"),
    ("conversation", "conv_1", "send the whole conversation as input instead"),
    ("conversation", {"id": "conv_1"}, "send the whole conversation as input instead"),
    ("background", True, "send stream: true to read it as it comes, or wait for it"),
    ("background", "yes", "send stream: true to read it as it comes, or wait for it"),
]
NOTHING_STORED: list[tuple[str, Any]] = [
    ("previous_response_id", None),
    ("previous_response_id", ""),
    ("conversation", None),
    ("background", None),
    ("background", False),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    """Takes fields that nobody has heard of."""
    with serving(unknown_fields=UnknownFields.IGNORE) as served:
        yield served


def ask(served: Served, **fields: Any) -> Any:
    return served.post({"model": MODEL, "input": "x", **fields}, "/v1/responses")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("field", "value", "hint"), STORED)
def test_what_would_need_it_is_refused_with_what_to_send_instead(
    served: Served, gateway: Served, field: str, value: Any, hint: str, streams: bool
) -> None:
    for server in (served, gateway):
        error = error_of(ask(server, stream=streams, **{field: value}), 400)
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert f"{field} is not supported" in error["message"]
        assert hint in error["message"]
        assert server.engine.requests == []


@pytest.mark.parametrize(("field", "value"), NOTHING_STORED)
def test_values_that_ask_for_nothing_of_it_are_taken(served: Served, field: str, value: Any) -> None:
    served.says("Fine.")
    answer = ask(served, **{field: value})
    assert answer.status_code == 200, answer.text
    assert answer.json().get(field) in (None, False)


def test_the_whole_conversation_as_input_goes_on_where_it_was() -> None:
    """The advice: all that was sent before, the items of the answer as they came, and what is new."""
    with with_template(THINKER) as served:
        served.says(THOUGHT + "It is an old town.")
        answer = ask(served, input="What is Ulm?", store=True).json()
        new = {"role": "user", "content": "How old?"}
        error = error_of(ask(served, input=[new], previous_response_id=answer["id"]), 400)
        assert "whole conversation" in error["message"]
        whole = [{"role": "user", "content": "What is Ulm?"}, *answer["output"], new]
        assert ask(served, input=whole).status_code == 200
        prompt = served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens))
        places = [prompt.index(words) for words in ("What is Ulm?", "It is an old town.", "How old?")]
        assert places == sorted(places)
