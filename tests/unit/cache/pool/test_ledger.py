"""The ledger alone: single blocks and many at once are the same thing, whatever the number at which they part."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from struct import pack, unpack
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.handles import COUNTER_MAX, block_of, generation_of, make_generation
from coppice.ids import CacheEpoch, DomainId
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.pool import ledger as ledger_module
from coppice_cache.core.pool.free_ring import FreeRing, blocks_array
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import Account

EPOCH = CacheEpoch(3)
BLOCKS = 24
NEVER, ALWAYS = BLOCKS, 0  # up to how many blocks are done one by one


@dataclass
class Side:
    """One ledger, its leases and what it answered."""

    few: int
    ledger: Ledger = field(init=False)
    accounts: list[Account] = field(init=False)
    leased: list[tuple[Account, bytes]] = field(default_factory=list)
    cached: list[tuple[Account, bytes]] = field(default_factory=list)
    draining: list[tuple[Account, bytes]] = field(default_factory=list)
    said: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(BLOCKS, EPOCH, any_wipes=True)
        generations = [0] * 8 + [make_generation(CacheEpoch(2), 9)] * 8
        generations += [make_generation(EPOCH, COUNTER_MAX - index) for index in range(8)]
        self.ledger.load(pack(f"<{BLOCKS}Q", *generations), bytes(range(1, 17)) * BLOCKS)
        names = (("plain", False, Mode.PRIVATE), ("wipes", True, Mode.PRIVATE), ("strict", False, Mode.STRICT))
        configs = [DomainConfig(DomainId(n), m, 0.5, zero_on_change=z) for n, z, m in names]
        self.accounts = [Account(config, BLOCKS) for config in configs]

    def step(self, kind: str, number: int, count: int) -> None:
        with patch.object(ledger_module, "_FEW", self.few):
            self.said.append(self._step(kind, number, count))

    def _step(self, kind: str, number: int, count: int) -> object:
        ledger = self.ledger
        if kind == "grant":
            account = self.accounts[number % len(self.accounts)]
            granted = ledger.grant(account, min(count, ledger.num_free))
            self.leased.append((account, granted.owned))
            return granted
        lists = {"publish": self.leased, "drain": self.leased, "release": self.leased}
        lists |= {"evict": self.cached, "seals": self.cached, "fenced": self.draining}
        if not lists[kind]:
            return None
        account, handles = chosen = lists[kind][number % len(lists[kind])]
        if kind == "seals":
            return ledger.seals_of(handles)
        lists[kind].remove(chosen)
        if kind == "publish":
            ledger.publish(account, handles, b"".join(handle.to_bytes(16) for handle in unpacked(handles)))
            self.cached.append(chosen)
        elif kind == "drain":
            ledger.drain_all(account, handles)
            self.draining.append(chosen)
        elif kind == "evict":
            ledger.evict(account, handles)
        else:
            ledger.give_back(account, handles, drained=kind == "fenced")
        return None

    def seen(self) -> object:
        ledger = self.ledger
        columns = bytes(ledger.state), ledger.generation.tobytes(), bytes(ledger.seals), bytes(ledger._zeroing)
        owners = [ledger.owners.use_of(block).config.domain for block in range(BLOCKS)]
        accounts = [(account.leased, account.cached, account.draining) for account in self.accounts]
        return columns, owners, accounts, ledger.counts, list(ledger.free), self.said


def unpacked(handles: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(handles) // 8}Q", handles)


STEPS = st.tuples(
    st.sampled_from(("grant", "grant", "publish", "drain", "release", "evict", "seals", "fenced")),
    st.integers(0, 5),
    st.integers(0, 12),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_few_blocks_and_many_are_the_same(steps: list[tuple[str, int, int]]) -> None:
    sides = [Side(NEVER), Side(ALWAYS), Side(ledger_module._FEW)]
    for step in steps:
        for side in sides:
            side.step(*step)
        assert sides[0].seen() == sides[1].seen() == sides[2].seen()
        assert all(sum(side.ledger.counts) == BLOCKS for side in sides)


@pytest.mark.parametrize("few", [NEVER, ALWAYS])
def test_a_block_in_another_state_is_refused(few: int) -> None:
    ledger = Ledger(8, EPOCH, any_wipes=False)
    account = Account(DomainConfig(DomainId("d")), 8)
    with patch.object(ledger_module, "_FEW", few):
        owned = ledger.grant(account, 3).owned
        with pytest.raises(AssertionError, match="not CACHED"):
            ledger.evict(account, owned)
        ledger.publish(account, owned, bytes(range(48)))
        with pytest.raises(AssertionError, match="not LEASED"):
            ledger.publish(account, owned, bytes(48))
        with pytest.raises(AssertionError, match="not LEASED"):
            ledger.give_back(account, owned, drained=False)
    assert ledger.counts == [5, 0, 3, 0]


def test_the_opening_frees_what_nobody_holds_in_order() -> None:
    ledger = Ledger(6, EPOCH, any_wipes=False)
    ledger.load(bytes(48), bytes(96))
    ledger.close()
    account = Account(DomainConfig(DomainId("d")), 6)
    for block in (1, 3):
        ledger.adopt(block, make_generation(CacheEpoch(2), 1), account)
    ledger.drain(3)
    ledger.drain(1)
    ledger.open([1])
    assert list(ledger.free) == [0, 2, 3, 4, 5]
    assert (account.draining, ledger.counts) == (1, [5, 0, 0, 1])


def test_accounts_that_left_nothing_behind_are_forgotten() -> None:
    """A thousand domains in turn on four blocks: the table follows the four."""
    ledger = Ledger(4, EPOCH, any_wipes=True)
    for number in range(1_000):
        account = Account(DomainConfig(DomainId(f"d{number}"), zero_on_change=True), 4)
        granted = ledger.grant(account, 2)
        assert len(granted.zero) == (16 if number >= 2 else 0)
        for handle in unpacked(granted.owned):
            assert ledger.owners.use_of(block_of(handle)) is account
        ledger.give_back(account, granted.owned, drained=False)
    assert len(ledger.owners.accounts) < 200


def test_generations_rise_over_many_grants_at_once() -> None:
    ledger = Ledger(16, EPOCH, any_wipes=False)
    account = Account(DomainConfig(DomainId("d")), 16)
    for turn in range(1, 4):
        owned = ledger.grant(account, 16).owned
        assert [generation_of(handle) for handle in unpacked(owned)] == [make_generation(EPOCH, turn)] * 16
        assert blocks_array(owned).tolist() == list(range(16))
        ledger.give_back(account, owned, drained=False)
    assert ledger.states.tolist() == [BlockState.FREE] * 16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("take", "popleft", "append", "extend")), st.integers(0, 7)), max_size=40))
def test_the_ring_is_a_queue(steps: list[tuple[str, int]]) -> None:
    ring, model, out = FreeRing(blocks_array(pack("<7Q", *range(7))), 7), deque(range(7)), deque[int]()
    for kind, count in steps:
        if kind == "popleft" and model:
            out.append(model.popleft())
            assert ring.popleft() == out[-1]
        elif kind == "take":
            taken = [model.popleft() for _ in range(min(count, len(model)))]
            assert ring.take(len(taken)).tolist() == taken
            out.extend(taken)
        elif kind == "append" and out:
            model.append(out.popleft())
            ring.append(model[-1])
        elif kind == "extend":
            added = [out.popleft() for _ in range(min(count, len(out)))]
            ring.extend(blocks_array(pack(f"<{len(added)}Q", *added)))
            model.extend(added)
        assert (list(ring), len(ring)) == (list(model), len(model))
