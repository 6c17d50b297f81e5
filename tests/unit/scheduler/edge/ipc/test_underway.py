"""What was sent to a planner and has not begun: its load, and which beginnings will be cached there."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from coppice.ids import DomainId
from coppice_scheduler.core.state.request import Output, Request, TokenBatch
from coppice_scheduler.edge.ipc.door_messages import Turn
from coppice_scheduler.edge.ipc.underway import BEGIN_TOKENS, Underway
from tests.fakes.api.engine import pack
from tests.fakes.scheduler.house import request

COMMON = list(range(1000, 1000 + 2 * BEGIN_TOKENS))


def of(number: int, *own: int, **fields: Any) -> Request:
    return replace(request(f"r{number}", [*COMMON, *own]), number=number, **fields)


def tokens(*numbers: int) -> Turn:
    packed = np.array(numbers, np.uint32).tobytes()
    return Turn((), (TokenBatch(packed, packed),), ())


def test_what_was_sent_is_load_until_the_planner_counts_it() -> None:
    underway = Underway()
    underway.add(of(1, 1), 100)
    underway.add(of(2, 2), 30)
    assert underway.num_tokens == 130
    underway.began(tokens(1, 7))
    assert underway.num_tokens == 30
    underway.counted()
    assert underway.num_tokens == 0
    underway.add(of(3, 3), 5)
    underway.ended("r2")
    assert underway.num_tokens == 5, "it was counted already"
    underway.ended("r3")
    underway.ended("r3")
    assert underway.num_tokens == 0


def test_a_beginning_is_there_from_when_it_is_sent_until_it_is_in_the_index() -> None:
    underway = Underway()
    assert underway.matched(of(9, 1, 2)) == 0
    underway.add(of(1, 1, 2, 3, 4), 0)
    underway.counted()
    assert underway.matched(of(9, 1, 2)) == len(COMMON) + 2
    assert underway.matched(of(9, 1, 5, 6, 7, 8)) == len(COMMON) + 1
    underway.began(tokens(1))
    assert underway.matched(of(9, 1, 2)) == 0


def test_an_output_is_a_beginning_too() -> None:
    underway = Underway()
    underway.add(of(1, 1), 10)
    underway.began(Turn((), (), (Output("r1", b""),)))
    assert underway.num_tokens == 10, "it was taken, no more"
    underway.began(Turn((), (), (Output("r1", pack([1])),)))
    assert (underway.num_tokens, underway.matched(of(9, 1))) == (0, 0)


def test_the_longest_of_several_counts() -> None:
    underway = Underway()
    for number in range(1, 4):
        underway.add(of(number, *range(number)), 0)
    assert underway.matched(of(9, 0, 1, 2, 3)) == len(COMMON) + 3
    underway.ended("r3")
    assert underway.matched(of(9, 0, 1, 2, 3)) == len(COMMON) + 2


def test_strangers_share_nothing() -> None:
    underway = Underway()
    underway.add(of(1, 1), 10)
    assert underway.matched(of(9, 1, domain=DomainId("another"))) == 0
    assert underway.matched(of(9, 1, salt=bytes(32))) == 0
    assert underway.matched(request("other", [7, *COMMON])) == 0
    for _ in range(2):
        assert underway.matched(request("empty", [])) == 0
        underway.add(request("empty", []), 0)


def test_a_call_is_no_prompt() -> None:
    underway = Underway()
    underway.add(of(1, 1, num_places=2), 10)
    assert (underway.num_tokens, underway.matched(of(9, 1))) == (10, 0)
    underway.ended("r1")
    assert underway == Underway()


def test_nothing_is_kept_of_what_is_over() -> None:
    underway = Underway()
    for number in range(1, 9):
        underway.add(of(number, number), 10)
    for number in range(1, 5):
        underway.ended(f"r{number}")
    underway.began(tokens(5, 6, 7, 8))
    assert underway == Underway()
    underway.add(of(1, 1), 10)
    underway.clear()
    assert underway == Underway()
