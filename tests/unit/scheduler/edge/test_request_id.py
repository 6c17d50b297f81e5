"""Which ids of clients count."""

from __future__ import annotations

import pytest

from coppice_scheduler.edge.base.request_id import ASKED_CHARS_MAX, names_meant, request_id_of


@pytest.mark.parametrize("sent", ["a", "7f3a-9", "trace:span.1_x", "x" * 64])
def test_a_clients_id_is_shown_and_begins_one_that_is_unique(sent: str) -> None:
    first, second = request_id_of(sent), request_id_of(sent)
    assert first.shown == second.shown == sent
    assert first.unique.startswith(f"{sent}-")
    assert first.unique != second.unique


@pytest.mark.parametrize("sent", [None, "", "x" * 65, "a b", "a\nb", "ä", "a\n", "a/b", "\x1b[1m"])
def test_any_other_is_replaced(sent: str | None) -> None:
    found = request_id_of(sent)
    assert found.shown == found.unique
    assert len(found.shown) == 32
    assert found != request_id_of(sent)


@pytest.mark.parametrize("sent", [None, "a", "x" * 64, "msg_a", "chatcmpl-b"])
@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_request_is_meant_by_its_id_and_by_its_answers(sent: str | None, prefix: str) -> None:
    found, other = request_id_of(sent), request_id_of("other")
    of_answer = f"{prefix}{found.unique}"
    assert len(of_answer) <= ASKED_CHARS_MAX
    for asked in (found.shown, of_answer):
        assert set(names_meant(asked)) & set(found.names), asked
        assert not set(names_meant(asked)) & set(other.names), asked


def test_only_the_id_of_the_answer_tells_two_of_one_id_apart() -> None:
    first, second = request_id_of("a"), request_id_of("a")
    assert set(names_meant("a")) & set(first.names) & set(second.names)
    assert not set(names_meant(f"cmpl-{first.unique}")) & set(second.names)
    assert not set(names_meant("cmpl-a")) & set(first.names), "that is no id of an answer"


@pytest.mark.parametrize("asked", ["", "a b", "*", "*-a", "ä", "a/b", "a\n", "x" * 65, "cmpl-", "cmpl-" + "x" * 82])
def test_what_is_no_id_means_nothing(asked: str) -> None:
    assert not {name for name in names_meant(asked) if name != asked or not asked.isascii()}
    assert names_meant(asked) in ((), ("cmpl-",))
