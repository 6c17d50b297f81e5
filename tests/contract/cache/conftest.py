"""A Redis for the tests of a file; tests that ask more of it have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from coppice_cache.edge.durability.log_store import connect_log
from tests.fakes.ports import valkey_server


@pytest.fixture(scope="module")
def valkey() -> Iterator[str]:
    """A real server out of a wheel."""
    with valkey_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def client(valkey: str) -> Iterator[redis.Redis]:
    """A client as the recovery log has one; nothing is stored yet."""
    with connect_log(valkey) as opened:
        opened.flushall()
        yield opened
