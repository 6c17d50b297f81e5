"""The page of blocks, with a cache service in this process and workers that are made up: what becomes of workers and of
copies between tiers is told as it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.messages.registration import Register
from tests.e2e.console.browsing import Console, console_at
from tests.fakes.cache.cache_ends import Cache, FakeWorker, UnaryClient, prompt

pytestmark = pytest.mark.wide
Keep = Callable[[Any], Any]


class DrainingWorker(FakeWorker):
    def register_message(self) -> Register:
        return replace(super().register_message(), draining=True)


class TieredWorker(FakeWorker):
    """With a host tier and a disk tier, of which nothing is used."""

    def register_message(self) -> Register:
        return replace(super().register_message(), num_host_blocks=8, num_disk_blocks=32)


@pytest.fixture
def keep() -> Iterator[Keep]:
    """`keep(thing)` returns it, and stops it at the end of the test."""
    with ExitStack() as kept:

        def keep_one(thing: Any) -> Any:
            kept.callback(thing.stop)
            return thing

        yield keep_one


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def shown(browser: Any, cache: Cache) -> Iterator[Console]:
    with console_at(browser, f"http://127.0.0.1:{cache.http_port}/") as opened:
        yield opened


def short(epoch: int) -> str:
    """As the page tells it."""
    return f"…{str(epoch)[-4:]}"


def told(shown: Console, kind: str) -> str:
    return shown.text(f".log li[data-kind={kind}] span")


def test_a_worker_that_is_replaced_is_seen_to_be_fenced(shown: Console, cache: Cache, keep: Keep) -> None:
    first = keep(FakeWorker(cache)).wait_registered()
    shown.open("blocks")
    shown.see(".bars")
    assert f"epoch {short(first.epoch)}" in shown.text(".map [role=status]")
    assert shown.page.locator(".log li").count() == 0, "what was so before is no news"
    first.stop()
    second = keep(FakeWorker(cache)).wait_registered()
    assert (
        told(shown, "fenced")
        == f"w: fenced, epoch {short(first.epoch)} → {short(second.epoch)}: what it had cached is gone"
    )
    shown.see(f".map [role=status]:has-text('epoch {short(second.epoch)}')")


def test_leases_that_wait_for_a_fence_are_seen_on_the_map_and_in_words(
    shown: Console, cache: Cache, keep: Keep
) -> None:
    worker = keep(FakeWorker(cache, acknowledges=False)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9), "tenant/a")
    shown.open("blocks")
    shown.see(".bars .domain")
    client.release(1, through_fence=True)
    shown.see(".log li:has-text('tenant/a: 3 blocks wait for a fence')")
    shown.see(".log li:has-text('w: 1 fence sent to it')")
    assert "1 fence not acknowledged" in shown.text(".map [role=status]")
    worker.acknowledge(worker.wait_fence())
    shown.see(".log li:has-text('tenant/a: 3 blocks free after a fence')")


def test_who_plans_for_a_worker_and_that_it_drains_stand_above_its_map(
    shown: Console, cache: Cache, keep: Keep
) -> None:
    keep(FakeWorker(cache, "plain")).wait_registered()
    shown.open("blocks")
    shown.see(".bars")
    assert "no scheduler plans for it" in shown.text(".map [role=status]")
    keep(DrainingWorker(cache, "full")).wait_registered()
    assert "full: registered, epoch" in told(shown, "joined")
    shown.page.select_option("select[aria-label=Worker]", "full")
    assert "takes no new request" in shown.text(".drains")
    assert "full (drains)" in shown.text("select[aria-label=Worker]")


def test_copies_between_tiers_are_told_by_how_many_there_were(shown: Console, cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    more = {"total_promoted": 0, "total_demoted": 0}
    shown.page.route("**/v1/blocks?*", lambda route: changed(route, more))
    shown.open("blocks")
    shown.see(".bars")
    more |= {"total_promoted": 12, "total_demoted": 1}
    assert told(shown, "promoted") == "w: 12 blocks came from host memory"
    assert told(shown, "demoted") == "w: 1 block went to host memory"
    more["total_promoted"] = 0  # of a cache service that has begun anew: nothing happened
    shown.page.wait_for_timeout(2_500)
    assert shown.page.locator(".log li").count() == 2


def test_the_disk_tier_has_a_map_of_its_own(shown: Console, cache: Cache, keep: Keep) -> None:
    keep(TieredWorker(cache)).wait_registered()
    more = {"total_promoted": 0, "num_promoting": 3}
    shown.page.route("**/v1/blocks?*", lambda route: changed(route, more))
    shown.open("blocks")
    shown.see(".bars")
    assert "host memory: 0 of 8 used · disk: 0 of 32 used" in shown.text(".map [role=status]")
    shown.page.select_option("select[aria-label=Tier]", "disk")
    shown.page.locator(".map [role=status]", has_text="32 blocks of").wait_for()
    assert "3 blocks come from the disk" in shown.text(".map [role=status]")
    more["total_promoted"] = 5
    assert told(shown, "promoted") == "w: 5 blocks came from the disk"


def changed(route: Any, more: dict[str, int]) -> None:
    """The service's answer, with these numbers."""
    answer = route.fetch()
    route.fulfill(response=answer, json=answer.json() | more)
