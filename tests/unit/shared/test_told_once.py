"""What is logged once: each text, and no memory for ever more of them."""

from __future__ import annotations

import pytest

from coppice.edge import told_once
from coppice.edge.told_once import ToldOnce


def test_each_text_is_new_once() -> None:
    told = ToldOnce()
    assert [told.is_new(text) for text in ("a", "b", "a", "b", "c")] == [True, True, False, False, True]


def test_it_remembers_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_once, "_TEXTS_MAX", 3)
    told = ToldOnce()
    for number in range(100):
        assert told.is_new(str(number))
        assert len(told._texts) <= 3
