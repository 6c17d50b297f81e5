"""Sessions with the cache service are told which version of the tenants file counts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coppice.tenants.file import version_of
from tests.fakes.cache.cache_ends import Cache, StreamClient
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
ONE = f"tenants:\n  - {{id: a, api_key_sha256: '{'0' * 64}'}}\n"
TWO = f"{ONE}  - {{id: b, api_key_sha256: '{'1' * 64}'}}\n"


def told(client: StreamClient) -> list[str]:
    return [message.version for message in client.tenants]


def test_who_attaches_is_told_and_so_is_everybody_when_it_changes(keep: Keep, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(ONE)
    cache = keep(Cache(tenants=str(path)))
    first, second = version_of(ONE.encode()), version_of(TWO.encode())
    clients = [keep(StreamClient(cache)) for _ in range(2)]
    for client in clients:
        wait_for(lambda client=client: told(client) == [first], "the version at the start")
    path.write_text(TWO)
    cache.process.look_at_tenants(always=True)
    for client in clients:
        wait_for(lambda client=client: told(client) == [first, second], "the version that counts now")
    later = keep(StreamClient(cache))
    wait_for(lambda: told(later) == [second], "the version at an attachment after the change")


def test_a_file_that_is_refused_is_not_told(keep: Keep, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(ONE)
    cache = keep(Cache(tenants=str(path)))
    client = keep(StreamClient(cache))
    for content in (f"{ONE}    wieght: 2\n", TWO):
        path.write_text(content)
        cache.process.look_at_tenants(always=True)
    wait_for(lambda: len(told(client)) == 2, "the version of the file that was right")
    assert told(client) == [version_of(ONE.encode()), version_of(TWO.encode())]


def test_without_a_file_that_is_said(keep: Keep) -> None:
    client = keep(StreamClient(keep(Cache())))
    wait_for(lambda: told(client) == [""], "that there is no file")
