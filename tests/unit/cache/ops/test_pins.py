"""Pins of an operator: a prefix that stays, whatever comes."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Grant, NoCapacity
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.settings import DomainConfig
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, registration, settings, tokens

BLOCK = 4
SYSTEM = tokens(16)


@pytest.fixture
def here() -> World:
    return World(num_blocks=8, block_size=BLOCK)


def pin(here: World, name: str = "system", data: bytes = SYSTEM, domain: DomainId = ALICE) -> int:
    count = here.core.pin(name, domain, NAMESPACE, data, here.now_ns)
    here.collect()
    return count


def found(here: World, data: bytes = SYSTEM, domain: DomainId = ALICE) -> int:
    return here.core.match(domain, NAMESPACE, data + tokens(1, 9_000), W).num_cached_tokens


def push_out(here: World, first: int = 100) -> None:
    """Fill the pool with other things, twice."""
    for number in range(4):
        here.fill(first + number, tokens(16, 1_000 * (number + first)))


def test_a_pinned_prefix_is_never_evicted(here: World) -> None:
    here.fill(1, SYSTEM)
    assert pin(here) == 16
    push_out(here)
    assert found(here) == 16


def test_without_the_pin_it_would_have_been(here: World) -> None:
    here.fill(1, SYSTEM)
    push_out(here)
    assert found(here) == 0


def test_unpinned_it_can_be_evicted_again(here: World) -> None:
    here.fill(1, SYSTEM)
    pin(here)
    assert here.core.unpin("system", here.now_ns)
    here.collect()
    push_out(here)
    assert found(here) == 0
    assert not here.core.unpin("system", here.now_ns)


def test_a_pin_waits_for_what_is_not_cached_yet(here: World) -> None:
    assert pin(here) == 0
    here.fill(1, SYSTEM[:32])
    here.fill(2, SYSTEM)
    push_out(here)
    assert found(here) == 16


def test_a_pin_holds_on_every_worker_and_on_those_to_come(here: World) -> None:
    here.fill(1, SYSTEM)
    pin(here)
    here.register(registration("v", num_blocks=8, block_size=BLOCK))  # type: ignore[arg-type]
    here.fill(2, SYSTEM, candidates=(("v", 0),))
    for number in range(10, 14):
        here.fill(number, tokens(16, 1_000 * number), candidates=(("v", 0),))
    assert here.core.match(ALICE, NAMESPACE, SYSTEM + tokens(1, 9), "v").num_cached_tokens == 16  # type: ignore[arg-type]
    assert {(view.worker_id, view.num_tokens) for view in here.core.pins()} == {("w", 16), ("v", 16)}


def test_the_rest_of_the_prompt_that_the_pin_names_is_left_alone(here: World) -> None:
    """Whole blocks are pinned; a pin in the middle of an edge protects what is above it and no more."""
    here.fill(1, SYSTEM + tokens(8, 50))
    assert pin(here, data=SYSTEM[:40]) == 8
    push_out(here)
    assert found(here, SYSTEM) == 8


def test_pins_cannot_take_what_is_guaranteed_to_others() -> None:
    here = World(settings(DomainConfig(DomainId("bob"), guarantee_share=0.75)), num_blocks=8, block_size=BLOCK)
    here.fill(1, SYSTEM)
    assert pin(here) == 8, "two blocks of eight are nobody's guarantee"
    assert isinstance(here.acquire(2, tokens(24, 500), domain=DomainId("bob")), Grant)


def test_a_strict_reader_of_the_rules_names_pins_well(here: World) -> None:
    here.fill(1, SYSTEM)
    pin(here)
    with pytest.raises(MessageRefused, match="already"):
        pin(here, data=tokens(8, 70))
    assert pin(here) == 16, "the same again is no mistake"
    for name, data in (("", SYSTEM), ("x" * 5_000, SYSTEM), ("y", b""), ("y", b"123")):
        with pytest.raises(MessageRefused):
            pin(here, name, data)


def test_an_invalidated_pin_pins_what_comes_after(here: World) -> None:
    here.fill(1, SYSTEM)
    pin(here)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    here.collect()
    here.tick(1_000)
    assert here.core.stats().cached_blocks == 0
    here.fill(2, SYSTEM)
    push_out(here)
    assert found(here) == 16


def test_a_full_pool_of_pins_is_an_honest_no(here: World) -> None:
    here.fill(1, tokens(32))
    assert pin(here, data=tokens(32)) == 32
    assert isinstance(here.acquire(2, tokens(4, 500)), NoCapacity)
