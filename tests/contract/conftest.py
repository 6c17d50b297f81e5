"""What contract tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture(params=["tcp", "unix"])
def listen_on(request: pytest.FixtureRequest, socket_dir: Path) -> str:
    """An address on which sessions can be accepted, of each kind."""
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{socket_dir}/sessions"
