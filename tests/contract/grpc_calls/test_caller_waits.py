"""Whose wait ends when one is too many."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from coppice.edge.grpc_calls.waits import CallerWaits, WaitEnded


class Waiting:
    """Waits of parties that go on until the test ends; `cancelled` has the names of those that were ended."""

    def __init__(self, waits_max: int) -> None:
        self.waits = CallerWaits(waits_max)
        self.cancelled: list[str] = []
        self._open: dict[str, ExitStack] = {}

    def begin(self, *names: str) -> None:
        """`a1` is a wait of party a."""
        for name in names:
            stack = self._open[name] = ExitStack()
            stack.enter_context(self.waits.waiting(name[0], lambda name=name: self.cancelled.append(name)))

    def end(self, name: str) -> None:
        self._open.pop(name).close()


def test_who_has_most_loses_the_oldest() -> None:
    waiting = Waiting(4)
    waiting.begin("b1", "a1", "a2", "a3")
    assert waiting.cancelled == []
    waiting.begin("a4", "b2", "c1")
    assert waiting.cancelled == ["a1", "a2", "b1"]
    assert waiting.waits.num_waiting == 4


def test_of_parties_with_as_many_the_one_that_waits_longest_loses() -> None:
    waiting = Waiting(2)
    waiting.begin("a1", "b1", "c1")
    assert waiting.cancelled == ["a1"]


def test_what_comes_after_the_end_does_not_count() -> None:
    waiting = Waiting(1)
    waiting.begin("a1", "a2")
    with pytest.raises(WaitEnded):
        waiting.end("a1")
    waiting.end("a2")
    assert waiting.waits.num_waiting == 0
    waiting.begin("b1")
    assert waiting.cancelled == ["a1"]


def test_an_error_is_not_hidden_by_the_end() -> None:
    waiting = Waiting(1)

    def fail_in_a_wait_that_ends() -> None:
        with waiting.waits.waiting("a", lambda: None):
            waiting.begin("b1", "b2")
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_wait_that_ends()
