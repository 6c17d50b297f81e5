"""What is logged once: each text, and no memory for ever more of them."""

from __future__ import annotations

import pytest

from coppice.edge import told_once
from coppice.edge.told_once import Outage, ToldOnce


def test_each_text_is_new_once() -> None:
    told = ToldOnce()
    assert [told.is_new(text) for text in ("a", "b", "a", "b", "c")] == [True, True, False, False, True]


def test_it_remembers_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_once, "_TEXTS_MAX", 3)
    told = ToldOnce()
    for number in range(100):
        assert told.is_new(str(number))
        assert len(told._texts) <= 3


def test_an_outage_is_told_once_when_it_has_lasted_and_each_anew() -> None:
    outage = Outage(told_after_s=3.0, again_after_s=60.0)
    assert outage.to_tell_s(0.0, "gone") is None, "nothing is away yet"
    for begins_s in (100.0, 200.0):
        for second in range(3):
            outage.begin(begins_s + second)
            assert outage.to_tell_s(begins_s + second, "gone") is None
        outage.begin(begins_s + 3)
        assert outage.to_tell_s(begins_s + 3.5, "gone") == 3.5
        assert outage.to_tell_s(begins_s + 60, "gone") is None, "it was told"
        assert outage.end()


def test_an_outage_is_told_again_from_time_to_time() -> None:
    outage = Outage(told_after_s=3.0, again_after_s=60.0)
    outage.begin(0.0)
    told = [second for second in range(200) if outage.to_tell_s(float(second), "gone") is not None]
    assert told == [3, 63, 123, 183]


def test_another_reason_is_told_at_once_but_not_each_of_many() -> None:
    outage = Outage(told_after_s=3.0, again_after_s=60.0)
    outage.begin(0.0)
    assert outage.to_tell_s(2.0, "refused") is None
    outage.told(2.5, "lost")
    assert outage.to_tell_s(4.0, "refused") == 4.0
    assert outage.to_tell_s(5.0, "lost") is None
    assert outage.to_tell_s(6.0, "silent") == 6.0
    assert sum(outage.to_tell_s(7.0, f"reason {number}") is not None for number in range(100)) < 10


def test_the_end_of_an_outage_that_nobody_heard_of_is_not_told() -> None:
    outage = Outage(told_after_s=3.0, again_after_s=60.0)
    outage.begin(1.0)
    assert not outage.end()
    outage.begin(3.9)
    assert outage.to_tell_s(4.5, "gone") is None, "what was before it counts no more"
    outage.told(5.0, "gone")
    assert outage.end()
    assert not outage.end()
