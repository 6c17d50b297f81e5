"""The copy of a pool's books says of every block what the ledger does, and stays as it is when the pool goes on."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.ids import DomainId, WorkerId
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.settings import DomainConfig
from coppice_cache.core.inspection import block_map
from coppice_cache.core.inspection.block_map import OTHERS, BlockMap
from coppice_cache.core.pool.ledger import BlockState
from tests.unit.cache.host_tier.test_disk_tier import stored
from tests.unit.cache.host_tier.tier_world import PROMPT, answer, ask, demoted, orders, push_out, world
from tests.unit.cache.inspection.test_snapshots import Busy
from tests.unit.cache.world import ALICE, W, World, settings, tokens

BOB = DomainId("bob")
SESSION_MS = 60_000  # longer than a session lives that is not heard


def map_of(here: World, tier: Tier = Tier.DEVICE) -> BlockMap:
    found = here.core.block_map(W, tier)
    assert found is not None
    return found


def told(found: BlockMap) -> list[tuple[str, str]]:
    """(state, domain) of each block; free ones have nobody."""
    cells = found.cells().tolist()
    assert len(cells) == found.num_blocks
    names = [domain.domain for domain in found.domains]
    return [(BlockState(cell % 4).name, names[cell // 4 - 1] if cell else "") for cell in cells]


def truth(here: World) -> list[tuple[str, str]]:
    ledger = here.core.state.workers[W].ledger
    states = [BlockState(ledger.state[block]) for block in range(ledger.num_blocks)]
    owners = [ledger.owners.use_of(block).config.domain for block in range(ledger.num_blocks)]
    return [(s.name, "" if s is BlockState.FREE else owner) for s, owner in zip(states, owners, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_map_says_what_the_ledger_does(seed: int) -> None:
    busy = Busy(seed)
    seen = set()
    for _ in range(60):
        busy.do_something()
        found = map_of(busy.world)
        assert told(found) == truth(busy.world)
        lengths, cells = found.runs()
        assert np.repeat(cells, lengths).tolist() == found.cells().tolist()
        assert all(a != b for a, b in zip(cells.tolist(), cells.tolist()[1:], strict=False)), "a run goes on"
        seen |= {state for state, _ in told(found)}
    assert seen >= {"FREE", "LEASED", "CACHED"}


def test_domains_have_their_counts_and_what_they_are_guaranteed() -> None:
    here = World(settings(DomainConfig(ALICE, guarantee_blocks=6, maximum_blocks=10), DomainConfig(BOB)), num_blocks=16)
    here.fill(1, tokens(12))
    here.acquire(2, tokens(9, 500), domain=BOB)
    alice, bob = map_of(here).domains
    assert (alice.domain, bob.domain) == (ALICE, BOB)
    assert (alice.cached_blocks, alice.guarantee_blocks, alice.maximum_blocks) == (3, 6, 10)
    assert (bob.leased_blocks, bob.guarantee_blocks) == (3, 0)


def test_who_is_guaranteed_something_is_told_before_it_holds_anything() -> None:
    here = World(settings(DomainConfig(ALICE, guarantee_blocks=6), DomainConfig(BOB)), num_blocks=16)
    (alice,) = map_of(here).domains
    assert (alice.domain, alice.guarantee_blocks) == (ALICE, 6)
    assert told(map_of(here)) == [("FREE", "")] * 16


def test_a_block_whose_owner_is_gone_is_free_and_nobodys() -> None:
    here = World(num_blocks=16)
    here.acquire(1, tokens(9))
    assert ("LEASED", ALICE) in told(map_of(here))
    here.release(1)
    assert told(map_of(here)) == [("FREE", "")] * 16


def test_a_map_does_not_change_when_the_pool_does() -> None:
    here = World(num_blocks=16)
    before = map_of(here)
    here.fill(1, tokens(12))
    assert told(before) == [("FREE", "")] * 16
    assert told(map_of(here)) != told(before)


def test_of_too_many_domains_those_that_hold_least_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "DOMAINS_MAX", 3)
    here = World(num_blocks=32)
    sizes = {"a": 2, "b": 4, "c": 3, "d": 1}
    for number, (name, size) in enumerate(sizes.items(), 1):
        here.fill(number, tokens(4 * size, 100 * number), domain=DomainId(name))
    found = map_of(here)
    assert [(one.domain, one.cached_blocks) for one in found.domains] == [("b", 4), ("c", 3), (OTHERS, 3)]
    assert sum(owner == OTHERS for _, owner in told(found)) == 3


def test_the_host_tier_has_a_map_of_its_own() -> None:
    here = demoted()
    assert told(map_of(here, Tier.HOST)).count(("CACHED", ALICE)) >= len(PROMPT) // 16
    assert map_of(here, Tier.HOST).num_blocks == 16


def test_copies_under_way_are_counted_by_direction() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    (order,) = orders(here)
    found = map_of(here)
    assert (found.num_promoting, found.num_demoting) == (0, 4)
    assert told(map_of(here, Tier.HOST)).count(("LEASED", ALICE)) == 4
    answer(here, order)
    found = map_of(here)
    assert (found.num_demoting, found.total_promoted, found.total_demoted) == (0, 0, 4)
    push_out(here)
    ask(here, 10)
    assert (map_of(here).num_promoting, map_of(here).total_promoted) == (4, 0)
    answer(here, orders(here)[-1])
    found = map_of(here)
    assert (found.num_promoting, found.total_promoted) == (0, 4)


def test_the_disk_tier_has_a_map_with_copies_of_its_own() -> None:
    here = stored()
    found = map_of(here, Tier.DISK)
    assert (found.num_blocks, told(found).count(("CACHED", ALICE)) >= len(PROMPT) // 16) == (64, True)
    ask(here, 10)
    assert (map_of(here, Tier.DISK).num_promoting, map_of(here).num_promoting) == (4, 0)
    before = map_of(here, Tier.DISK).total_promoted
    answer(here, orders(here)[-1])
    found = map_of(here, Tier.DISK)
    assert (found.num_promoting, found.total_promoted - before) == (0, 4)
    assert found.total_demoted > 0


def test_a_copy_that_failed_brought_nothing() -> None:
    here = world()
    here.fill(1, PROMPT)
    here.fill(2, tokens(4, 500))
    here.tick()
    (order,) = orders(here)
    answer(here, order, failed=True)
    assert map_of(here).total_demoted == 0


def test_fences_are_counted_when_they_are_sent_and_stay_counted() -> None:
    here = World(num_blocks=16)
    before = map_of(here).total_fences
    here.acquire(1, tokens(9))
    here.tick(SESSION_MS)
    found = map_of(here)
    assert (found.total_fences, found.fences) == (before + 1, 1)
    assert told(found).count(("DRAINING", ALICE)) == 3
    here.ack(here.fences()[-1])
    found = map_of(here)
    assert (found.total_fences, found.fences) == (before + 1, 0)


def test_there_is_no_map_of_who_is_not_there() -> None:
    here = World(num_blocks=16)
    assert here.core.block_map(WorkerId("nobody")) is None
    assert here.core.block_map(W, Tier.HOST) is None
    assert demoted().core.block_map(W, Tier.DISK) is None
