"""A Redis that asks for a password, with the users that deploy/make-secrets names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from coppice.settings import parse_settings
from coppice_cache.edge.durability.registry import connect
from coppice_cache.edge.settings import CacheSettings
from tests.fakes.cache.cache_ends import Cache, FakeWorker, UnaryClient, prompt
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for
from tests.unit.repository.test_deploy_files import make_secrets

Keep = Callable[[Any], Any]


class Guarded:
    """A server with those users, and the settings of a cache that knows its password."""

    def __init__(self, keep: Keep, folder: Path) -> None:
        make_secrets(folder)
        self.secrets = folder / "secrets"
        server = keep(valkey_server(config={"aclfile": str(self.secrets / "redis.acl")}))
        server.start()
        self.address = f"127.0.0.1:{server.port}/0"
        self.url = f"redis://coppice@{self.address}"
        environ = {"COPPICE_CACHE_REDIS_PASSWORD_FILE": str(self.secrets / "redis_password")}
        self.password = parse_settings(CacheSettings, [], environ, "cache").redis_password


@pytest.fixture
def guarded(keep: Keep, tmp_path: Path) -> Guarded:
    return Guarded(keep, tmp_path)


def problems(cache: Cache) -> list[str]:
    return list(cache.rest("/readyz")[1]["reasons"])


def test_all_that_the_cache_asks_of_redis_is_allowed_to_its_user(guarded: Guarded, keep: Keep) -> None:
    """Epoch, registry, recovery log, events."""
    cache = keep(
        Cache(redis_url=guarded.url, redis_password=guarded.password, kv_events_redis_stream="coppice:kv_events")
    )
    keep(FakeWorker(cache)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9), "tenant/default")
    client.publish(1, prompt(8))
    reader = keep(connect(guarded.url, guarded.password.get_secret_value()))
    for kept in ("coppice:workers", "coppice:index:*", "coppice:kv_events", "coppice:cache_epoch*"):
        wait_for(lambda kept=kept: list(reader.scan_iter(kept)), f"{kept} in Redis")  # type: ignore[misc]
    assert problems(cache) == []
    for forbidden in ("FLUSHALL", "CONFIG GET dir", "KEYS *", "ACL LIST", "GET somebody-elses"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            reader.execute_command(*forbidden.split())


def test_without_the_password_redis_only_says_that_it_lives(guarded: Guarded, keep: Keep) -> None:
    stranger = keep(connect(f"redis://{guarded.address}"))
    assert stranger.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        stranger.get("coppice:cache_epoch")
    cache = keep(Cache(redis_url=guarded.url, redis_password="wrong"))
    assert problems(cache)
