"""What contract tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")


@pytest.fixture
def keep() -> Iterator[Callable[[T], T]]:
    """`keep(thing)` returns it; at the end of the test all kept things are stopped or closed, last first."""
    kept: list[T] = []

    def keep_one(thing: T) -> T:
        kept.append(thing)
        return thing

    yield keep_one
    for thing in reversed(kept):
        end = getattr(thing, "stop", None) or getattr(thing, "close", None)
        assert end is not None, f"{thing!r} can be neither stopped nor closed"
        end()
