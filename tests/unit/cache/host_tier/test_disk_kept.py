"""What a worker's disk has outlives its process: it is found again as far as worker and cache service agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from coppice.handles import COUNTER_BITS
from coppice.ids import WorkerEpoch
from coppice.messages.index import Grant, Pending
from coppice.messages.registration import Direction, Register, Registered
from coppice_cache.core.base.events import IndexEvent
from coppice_cache.core.base.results import Regrown, ToWorkerEffect
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.pool.ledger import BlockState
from tests.unit.cache.host_tier.test_disk_tier import last, send_down, settle, stored, where, with_disk, worker_of
from tests.unit.cache.host_tier.tier_world import BLOCK, PROMPT, answer, ask, orders
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, registration, tokens

NONE = WorkerEpoch(0)


class Gone:
    """A worker that has ended with PROMPT on its disk alone, and what its files say."""

    def __init__(self, here: World) -> None:
        worker = worker_of(here)
        assert worker.disk is not None
        ledger = worker.disk.store.ledger
        self.epoch = worker.epoch
        self.generations, self.seals = ledger.generations.copy(), ledger.seal_words.copy()
        there = worker.disk.store.find_tree(ALICE, NAMESPACE)
        assert there is not None
        (node,) = [node for node in there.children.values() if PROMPT.startswith(node.tokens)]
        self.blocks = [node.block(number) for number in range(node.num_blocks)]

    def process(self, **more: Any) -> Register:
        """What the next one registers with: no epoch, and a disk."""
        names: dict[str, Any] = {"num_host_blocks": 8, "num_disk_blocks": len(self.generations)}
        names |= {"host_generations": bytes(64), "host_seals": bytes(128), "disk_epoch": self.epoch}
        names |= {"disk_generations": self.generations.tobytes(), "disk_seals": self.seals.tobytes()}
        return changed(registration(num_blocks=8, block_size=BLOCK), **names | more)


def ended(here: World) -> Gone:
    gone = Gone(here)
    here.core.end_worker(W, here.now_ns)
    here.collect()
    return gone


def told(here: World) -> Registered:
    """The last answer to a registration."""
    sent = [effect.message for effect in here.log if isinstance(effect, ToWorkerEffect)]
    return [message for message in sent if isinstance(message, Registered)][-1]


def test_a_new_process_goes_on_with_the_disk_of_the_one_before() -> None:
    here = stored()
    gone = ended(here)
    here.register(gone.process())
    assert told(here).keeps_disk
    assert told(here).worker_epoch != gone.epoch
    assert where(here) == [0, 0, 4]
    assert any(isinstance(effect, Regrown) for effect in here.log)
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (Direction.LOAD, 4)
    answer(here, orders(here)[-1])
    assert isinstance(ask(here, 10), Pending)
    answer(here, orders(here)[-1])
    grant = ask(here, 10)
    assert isinstance(grant, Grant)
    assert grant.num_cached_tokens == 16


def test_what_is_granted_next_is_newer_than_what_is_there() -> None:
    here = stored()
    gone = ended(here)
    here.register(gone.process())
    object.__setattr__(here.core.state.settings, "demote_below_share", 0.1)
    for number in range(40, 70):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    worker = worker_of(here)
    assert worker.disk is not None
    ledger = worker.disk.store.ledger
    written = np.flatnonzero(ledger.generations != gone.generations)
    assert len(written) > 32
    assert (ledger.generations[written] > gone.generations[written]).all()


@pytest.mark.parametrize("what", ["generation", "seal"])
def test_a_block_that_is_another_by_now_is_forgotten_with_all_behind_it(what: str) -> None:
    here = stored()
    gone = ended(here)
    if what == "generation":
        gone.generations[gone.blocks[1]] += np.uint64(1)
    else:
        gone.seals[gone.blocks[1]] = 0
    here.register(gone.process())
    assert where(here) == [0, 0, 1]


@pytest.mark.parametrize(
    "more",
    [
        {"disk_epoch": WorkerEpoch(77)},
        {"disk_epoch": NONE},
        {"disk_generations": b"", "disk_seals": b""},
    ],
    ids=["of another epoch", "of none", "nothing said"],
)
def test_files_of_which_nothing_is_known_are_over(more: dict[str, Any]) -> None:
    here = stored()
    here.register(ended(here).process(**more))
    assert not told(here).keeps_disk
    assert where(here) == [0, 0, 0]
    assert list(worker_of(here).stores[2].ledger.counts)[BlockState.FREE] == 64
    assert not worker_of(here).stores[2].ledger.generations.any()


def test_a_disk_whose_generations_nobody_has_granted_begins_anew() -> None:
    here = stored()
    gone = ended(here)
    gone.generations[gone.blocks[0]] += np.uint64(1 << COUNTER_BITS)  # of a later cache epoch
    here.register(gone.process())
    assert not told(here).keeps_disk


def test_an_answer_that_was_lost_is_given_again() -> None:
    here = stored()
    gone = ended(here)
    here.register(gone.process())
    here.register(gone.process())
    assert told(here).keeps_disk
    assert where(here) == [0, 0, 4]


def test_a_worker_that_was_given_up_and_is_back_keeps_its_disk() -> None:
    here = stored()
    gone = ended(here)
    here.register(gone.process(worker_epoch=gone.epoch))
    assert told(here).keeps_disk
    assert where(here) == [0, 0, 4]


@pytest.mark.parametrize("named", [{}, {"domain": ALICE}, {"domain": ALICE, "namespace": NAMESPACE}])
def test_what_is_invalidated_while_its_worker_is_away_does_not_come_back(named: dict[str, Any]) -> None:
    here = stored()
    gone = ended(here)
    here.core.invalidate(now_ns=here.now_ns, **named)
    here.collect()
    here.register(gone.process())
    assert where(here) == [0, 0, 0]


def test_a_prefix_that_is_invalidated_meanwhile_does_not_come_back() -> None:
    here = stored()
    gone = ended(here)
    here.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:32], now_ns=here.now_ns)
    here.collect()
    here.register(gone.process())
    assert where(here) == [0, 0, 0]


def test_a_domain_that_changed_its_mode_meanwhile_is_forgotten() -> None:
    here = with_disk(DomainConfig(ALICE))
    send_down(here)
    gone = ended(here)
    for mode in (Mode.STRICT, Mode.PRIVATE):
        here.core.set_domains((DomainConfig(ALICE, mode=mode, guarantee_share=0.5),), here.now_ns)
        here.collect()
    here.register(gone.process())
    assert where(here)[2] == 0


def test_who_asks_for_zeroing_by_now_finds_nothing_there() -> None:
    here = with_disk(DomainConfig(ALICE))
    send_down(here)
    gone = ended(here)
    here.core.set_domains((DomainConfig(ALICE, zero_on_change=True),), here.now_ns)
    here.collect()
    here.register(gone.process())
    assert where(here)[2] == 0


def test_it_is_remembered_for_a_while() -> None:
    here = stored()
    gone = ended(here)
    here.tick(here.core.state.settings.set_aside_ms, alive=(here.session,))
    here.register(gone.process())
    assert not told(here).keeps_disk
    assert not here.core.state.aside.num_blocks


def test_there_is_a_bound_to_what_is_remembered() -> None:
    here = stored()
    object.__setattr__(here.core.state.settings, "set_aside_blocks_max", 3)
    gone = ended(here)
    assert not here.core.state.aside.num_blocks
    here.register(gone.process())
    assert not told(here).keeps_disk


# ---- cache service and worker end together ----


def after(before: World) -> tuple[World, Gone]:
    """The service that comes next, which has loaded the log."""
    gone = Gone(before)
    events: list[IndexEvent]
    events, cursor = before.core.snapshot_slice(None, 1 << 20)
    assert cursor is None
    here = World(replace(before.core.state.settings, record_events=True), epoch=2)
    here.core.load_replay({W: events})
    return here, gone


def test_the_log_has_what_is_on_the_disk_of_a_worker_that_ended_too() -> None:
    here, gone = after(stored())
    here.register(gone.process())
    here.session = here.attach()
    assert told(here).keeps_disk
    assert where(here) == [0, 0, 4]
    assert isinstance(ask(here, 10), Pending)
    assert last(here) == (Direction.LOAD, 4)


def test_a_worker_that_takes_long_to_come_back_finds_what_the_log_had() -> None:
    here, gone = after(stored())
    for _ in range(40):
        here.tick(1_000)
    assert not here.core.is_replaying
    assert here.core.state.aside.num_blocks
    here.register(gone.process())
    assert told(here).keeps_disk
    assert where(here) == [0, 0, 4]


def test_of_another_era_nothing_is_kept() -> None:
    here, gone = after(stored())
    object.__setattr__(here.core.state, "cache_epoch", (1 << 16) + 2)
    here.register(gone.process())
    assert not told(here).keeps_disk
