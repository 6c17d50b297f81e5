"""Dataclasses as plain lists and back; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice_scheduler.edge.ipc.records import RecordError, from_plain, to_plain

Name = NewType("Name", str)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    share: float


@dataclass(frozen=True, slots=True)
class Outer:
    name: Name
    raw: bytes
    flag: bool
    colour: Colour
    maybe: Inner | None
    many: tuple[Inner, ...]
    mark: tuple[str, int, int]
    ids: frozenset[int]
    by_name: Mapping[str, Inner]


EXAMPLE = Outer(
    Name("n"), b"\x00", True, Colour.BLUE, None, (Inner(1, 0.5),), ("queue", 1, 2), frozenset({3}), {"a": Inner(2, 1.0)}
)
inners = st.builds(Inner, st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False))
outers = st.builds(
    Outer,
    name=st.text().map(Name),
    raw=st.binary(),
    flag=st.booleans(),
    colour=st.sampled_from(Colour),
    maybe=st.none() | inners,
    many=st.lists(inners, max_size=3).map(tuple),
    mark=st.tuples(st.text(), st.integers(0, 9), st.integers(0, 9)),
    ids=st.frozensets(st.integers(0, 2**32 - 1), max_size=3),
    by_name=st.dictionaries(st.text(), inners, max_size=3),
)


@given(outers)
def test_what_goes_out_comes_back(record: Outer) -> None:
    assert from_plain(Outer, msgpack.unpackb(msgpack.packb(to_plain(record)))) == record


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (0, 1, "Outer.name: int where str belongs"),
        (1, "x", "Outer.raw: str where bytes belongs"),
        (2, 1, "Outer.flag: int where bool belongs"),
        (3, "green", "Outer.colour: no member of Colour"),
        (3, [], "Outer.colour: no member of Colour"),
        (4, [True, 1.0], "Outer.maybe: Inner.number: bool where int belongs"),
        (4, [1, "x"], "Outer.maybe: Inner.share: str where float belongs"),
        (5, [[1]], "Outer.many: 1 values where Inner has 2"),
        (5, None, "Outer.many: NoneType where a list belongs"),
        (6, ["queue", 1], "Outer.mark: 2 values where a list has 3"),
        (7, ["x"], "Outer.ids: str where int belongs"),
        (8, [], "Outer.by_name: list where a map belongs"),
        (8, {"a": 1}, "Outer.by_name: int where Inner belongs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(place: int, wrong: Any, words: str) -> None:
    plain = to_plain(EXAMPLE)
    plain[place] = wrong
    with pytest.raises(RecordError) as caught:
        from_plain(Outer, plain)
    assert str(caught.value) == words


def test_a_float_may_come_as_a_whole_number() -> None:
    share = from_plain(Inner, [1, 2]).share
    assert (share, type(share)) == (2.0, float)


def test_other_annotations_are_no_records() -> None:
    @dataclass
    class Odd:
        things: list[int]

    with pytest.raises(TypeError, match="no record holds"):
        to_plain(Odd([1]))
