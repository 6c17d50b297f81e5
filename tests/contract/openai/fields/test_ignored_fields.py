"""Fields that change no output are taken and told; unknown are refused, or taken and told, as an operator says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice_scheduler.edge.http import generation
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER, UnknownFields
from coppice_scheduler.edge.openai.parsing.fields import CHAT, CHAT_ONLY, COMPLETION, NO_EFFECT
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import MODEL, Served, error_of, serving

__all__ = ["served", "shared_server"]

USER = {"role": "user", "content": "one"}


@pytest.fixture(scope="module", params=[UnknownFields.WARN, UnknownFields.IGNORE])
def lenient(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(unknown_fields=request.param) as served:
        yield served


@pytest.mark.parametrize("value", ["x", 5, True, ["x"], {"team": "blue"}], ids=repr)
def test_what_changes_nothing_is_taken_with_any_value_and_told(served: Served, value: Any) -> None:
    fields = dict.fromkeys(NO_EFFECT, value)
    of_chats = {name: value for name in NO_EFFECT if name not in CHAT_ONLY}
    for answer, taken in (
        (served.complete(**fields), fields),
        (served.chat(**of_chats), of_chats),
        (served.chat(stream=True, **of_chats), of_chats),
    ):
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED_HEADER] == ", ".join(taken)


def test_an_ordinary_answer_has_no_such_header(served: Served) -> None:
    for answer in (served.complete(), served.complete(user=None), served.chat(messages=[USER])):
        assert IGNORED_HEADER not in answer.headers


def test_the_package_of_openai_may_send_them(served: Served) -> None:
    answer = served.client().chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        metadata={"team": "blue"},
        store=True,
        user="ann",
        service_tier="flex",
        verbosity="low",
        safety_identifier="a1",
    )
    assert set(answer.headers[IGNORED_HEADER].split(", ")) == {
        "metadata", "store", "user", "service_tier", "verbosity", "safety_identifier",
    }  # fmt: skip
    assert answer.parse().choices


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_an_answer_may_be_sent_back_as_it_came(served: Served, empty: Any) -> None:
    answered = {"role": "assistant", "content": "y", "reasoning": empty, "annotations": [{"type": "url_citation"}]}
    answer = served.chat(messages=[USER, answered, USER])
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "messages[].annotations"


def test_an_operator_may_take_what_nobody_has_heard_of(lenient: Served) -> None:
    answer = lenient.complete(top_a=1, hue={"h": 1}, nothing=None)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "top_a, hue"
    answer = lenient.chat(messages=[{**USER, "hue": 1}, {**USER, "hue": 2}], hue=1)
    assert answer.headers[IGNORED_HEADER] == "hue, messages[].hue"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object", "hue": 1}}, "response_format.hue"),
        ({"structured_outputs": {"hue": 1}}, "structured_outputs.hue"),
        ({"messages": [USER]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_would_change_the_answer_is_refused_all_the_same(
    lenient: Served, fields: dict[str, Any], name: str
) -> None:
    assert error_of(lenient.complete(**fields), 400)["param"] == name
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert "tool_calls" in error_of(lenient.chat(messages=[calls]), 400)["param"]


def test_the_header_is_bounded_and_holds_no_line_of_a_client(lenient: Served) -> None:
    answer = lenient.complete(**{f"field {number}\r\nx-evil: 1": 1 for number in range(100)})
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert len(answer.headers[IGNORED_HEADER]) < 1500
    assert answer.headers[IGNORED_HEADER].endswith("and 84 more")
    assert lenient.complete(**{"é" * 5000: 1}).headers[IGNORED_HEADER] == "?" * 64


def test_a_warning_names_each_field_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(unknown_fields=UnknownFields.WARN) as served, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert served.complete(colour=1, user="ann").status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "the field 'colour', which clients send, has no effect here"
    ]


def test_warnings_come_to_an_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "WARNINGS_MAX", 3)
    with serving(unknown_fields=UnknownFields.WARN) as served, caplog.at_level(logging.WARNING):
        for number in range(10):
            assert served.complete(**{f"hue{number}": 1}).status_code == 200
    assert len(caplog.records) == 3


def test_the_document_names_every_field_that_is_taken() -> None:
    document = (Path(__file__).parents[4] / "docs" / "API.md").read_text()
    assert not {name for name in CHAT.supported | COMPLETION.supported if f"`{name}`" not in document}
