"""One REST server per test module, with a fresh fake engine's memory per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.api.engine import echo
from tests.fakes.api.rest import Served, serving


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(shared_server: Served) -> Served:
    engine = shared_server.engine
    engine.script, engine.ready = echo, True
    for seen in (engine.requests, engine.open_calls, engine.finished_early, engine.cancelled):
        seen.clear()
    engine.some_cancelled.clear()
    engine.some_hanging.clear()
    engine.max_running = engine.num_running
    return shared_server
