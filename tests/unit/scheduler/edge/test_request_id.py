"""Which ids of clients count."""

from __future__ import annotations

import pytest

from coppice_scheduler.edge.base.request_id import request_id_of


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
