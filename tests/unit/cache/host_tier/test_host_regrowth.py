"""After a restart the host tier comes back from the log, as far as the worker agrees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from coppice.messages.index import Grant, Pending
from coppice.messages.registration import CopyOrder, Direction
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.results import Regrown
from coppice_cache.core.base.settings import DomainConfig, Eviction, Mode
from tests.unit.cache.host_tier.tier_world import PROMPT, answer, ask, demoted, host_blocks, orders
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, registration, tokens

OTHER_KEY = b"o" * 16
BLOCK, DEVICE, HOST = 4, 8, 16


def left_behind() -> World:
    """PROMPT is in the host tier alone."""
    before = demoted()
    before.core.end_client(before.session, before.now_ns)
    before.collect()
    return before


class After:
    """The service that comes next: it loads the log, and the worker registers with what it has."""

    def __init__(self, before: World, *domains: DomainConfig, **changes: object) -> None:
        old = before.core.state.workers[W]
        assert old.host is not None
        events, cursor = before.core.snapshot_slice(None, 1 << 20)
        assert cursor is None
        config = replace(before.core.state.settings, record_events=True, domains=domains, **changes)  # type: ignore[arg-type]
        self.here = World(config, epoch=2)
        self.here.core.load_replay({W: events})
        self.device = old.ledger
        self.generations = old.host.store.ledger.generations.copy()
        self.seals = old.host.store.ledger.seal_words.copy()
        message = registration(num_blocks=DEVICE, block_size=BLOCK, epoch=old.epoch, highest=1)
        self.here.register(
            changed(
                message,
                generations=self.device.generations.tobytes(),
                seals=bytes(self.device.seals),
                num_host_blocks=HOST,
                host_generations=self.generations.tobytes(),
                host_seals=self.seals.tobytes(),
            )
        )

    def open(self, *, with_host: bool = True) -> World:
        """The worker acknowledges the window's fence."""
        here = self.here
        here.tick(here.core.state.settings.session_ttl_ms)
        (fence,) = here.fences()
        host = {"host_generations": self.generations.tobytes(), "host_seals": self.seals.tobytes()} if with_host else {}
        here.ack(fence, generations=self.device.generations.tobytes(), seals=bytes(self.device.seals), **host)
        here.session = here.attach()
        return here


def test_what_the_host_had_is_promoted_after_a_restart() -> None:
    before = left_behind()
    here = After(before).open()
    assert host_blocks(here) == host_blocks(before)
    assert here.core.replay_counts.replayed_to_host == 4
    assert any(isinstance(effect, Regrown) for effect in here.log)
    assert isinstance(ask(here, 10), Pending)
    (order,) = orders(here)
    assert order.direction is Direction.PROMOTE
    assert order.seals == chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)
    assert np.frombuffer(order.src, "<u8").tolist() == np.frombuffer(_first_demotion(before).dst, "<u8").tolist()


def test_it_is_found_only_once_the_worker_is_open() -> None:
    after = After(left_behind())
    host = after.here.core.state.workers[W].host
    assert host is not None
    assert not host.store.trees
    after.open()
    assert host.store.trees


@pytest.mark.parametrize("what", ["generation", "seal"])
def test_a_block_that_is_another_by_now_is_forgotten_with_all_behind_it(what: str) -> None:
    before = left_behind()
    after = After(before)
    second = np.frombuffer(_first_demotion(before).dst, "<u8")[1] & np.uint64((1 << 24) - 1)
    if what == "generation":
        after.generations[second] += 1
    after.seals[second] = 0
    here = after.open()
    assert isinstance(ask(here, 10), Pending)
    assert len(orders(here)[-1].src) == 8, "the first block alone"


def test_without_a_second_look_nothing_is_found() -> None:
    here = After(left_behind()).open(with_host=False)
    assert host_blocks(here) == [HOST, 0, 0, 0]
    assert here.core.replay_counts.unclaimed == 4
    assert isinstance(ask(here, 10), Grant)


@pytest.mark.parametrize(
    "config",
    [DomainConfig(ALICE, zero_on_change=True), DomainConfig(ALICE, mode=Mode.DISABLED)],
    ids=["zeroed", "disabled"],
)
def test_nothing_comes_back_of_a_domain_that_leaves_no_residue_by_now(config: DomainConfig) -> None:
    here = After(left_behind(), config).open()
    assert host_blocks(here) == [HOST, 0, 0, 0]


def test_what_is_invalidated_before_the_worker_opens_stays_away() -> None:
    after = After(left_behind())
    after.here.core.invalidate(domain=ALICE, now_ns=after.here.now_ns)
    here = after.open()
    assert isinstance(ask(here, 10), Grant)


def test_a_tree_keeps_its_chain_key_in_both_tiers_when_the_seal_key_changes() -> None:
    here = After(left_behind(), seal_key=OTHER_KEY, previous_seal_keys=(KEY,)).open()
    assert isinstance(ask(here, 10), Pending)
    worker = here.core.state.workers[W]
    seals = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)
    assert chain_seals(worker.trees[ALICE, NAMESPACE].chain_key, NO_SEAL, PROMPT, BLOCK * 4) == seals
    assert orders(here)[-1].seals == seals


def test_more_than_a_domain_may_hold_by_now_is_evicted() -> None:
    here = After(left_behind(), DomainConfig(ALICE, maximum_share=2 / HOST)).open()
    assert host_blocks(here)[2] == 2


def test_what_came_back_is_evicted_like_anything_else() -> None:
    here = After(left_behind(), eviction=Eviction.LRU, demote_below_share=1.0).open()
    for number in range(12):
        here.fill(number, tokens(16, 1_000 * (number + 7)))
        here.tick(100, alive=(here.session,))
        _answer_all(here)
    assert not isinstance(ask(here, 99), Pending), "it was the coldest"


def _first_demotion(here: World) -> CopyOrder:
    return next(order for order in orders(here) if order.direction is Direction.DEMOTE)


def _answer_all(here: World) -> None:
    host = here.core.state.workers[W].host
    assert host is not None
    for job in tuple(host.jobs.values()):
        answer(here, job.order)
