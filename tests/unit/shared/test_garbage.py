"""The garbage collector of a process that answers looks at what is new, and seldom at more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from coppice.garbage import shorten_pauses

NUM_OBJECTS = 700_000  # more than any burst of requests makes


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def whole_collections() -> int:
    """Collections of everything, during a burst."""
    before = gc.get_stats()[2]["collections"]
    alive = [[number] for number in range(NUM_OBJECTS)]
    assert len(alive) == NUM_OBJECTS
    return int(gc.get_stats()[2]["collections"]) - int(before)


def test_a_burst_starts_no_whole_collection() -> None:
    shorten_pauses()
    assert gc.get_freeze_count() > 1000, "what is loaded is not looked at again"
    assert whole_collections() == 0


def test_what_refers_to_itself_is_found_all_the_same() -> None:
    shorten_pauses()

    class Loop:
        pass

    before = gc.get_stats()
    for _ in range(10_000):
        loop = Loop()
        loop.itself = loop  # type: ignore[attr-defined]
    gained = sum(now["collected"] - then["collected"] for now, then in zip(gc.get_stats(), before, strict=True))
    assert gained > 5_000
