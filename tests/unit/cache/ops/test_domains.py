"""Domains and their shares change while the core runs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId
from coppice.messages.index import Extended, Grant, NoCapacity, NoCapacityReason, Publish, Reclaim, Release
from coppice_cache.core.base.errors import SettingsRefused
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache import world as cache_world
from tests.unit.cache.world import MS, W, World, lease_id, registration, tokens

A, B, C = DomainId("a"), DomainId("b"), DomainId("c")


def world(*configs: DomainConfig, **pool: int) -> World:
    return World(cache_world.settings(*configs, default_domain=None), **({"num_blocks": 16} | pool))


def change(world: World, *configs: DomainConfig) -> None:
    world.core.set_domains(configs, world.now_ns)
    world.collect()


def cached(world: World, domain: DomainId) -> int:
    account = world.core.state.workers[W].quotas.accounts.get(domain)
    return account.cached if account is not None else 0


def test_a_new_domain_is_served_and_waits_until_it_is_known() -> None:
    one = world(DomainConfig(A))
    answer = one.acquire(1, tokens(8), domain=B)
    assert answer == NoCapacity(lease_id(1), NoCapacityReason.DOMAIN_UNKNOWN, 500), "the next look may find it listed"
    held = one.granted(2, tokens(8), domain=A)
    change(one, DomainConfig(A), DomainConfig(B, guarantee_share=0.5))
    assert isinstance(one.acquire(1, tokens(8), domain=B), Grant)
    assert one.acquire(2, tokens(8), domain=A) == held
    assert isinstance(one.extend(2, 20), Extended)


def test_a_removed_domain_takes_no_acquire_and_its_memory_comes_back() -> None:
    one = world(DomainConfig(A, guarantee_share=0.5), DomainConfig(B))
    one.fill(1, tokens(16), domain=A)
    running = one.granted(2, tokens(16), domain=A)
    assert running.num_cached_tokens
    change(one, DomainConfig(B))
    assert isinstance(one.acquire(3, tokens(16), domain=A), NoCapacity)
    assert isinstance(one.extend(2, 24), Extended), "what runs goes on"
    one.publish(2, 4, tokens(24)[64:])
    one.tick(1, alive=(one.session,))
    assert cached(one, A) == len(running.shared) // 8, "what is pinned stays"
    one.release(2)
    one.tick(100, alive=(one.session,))
    assert cached(one, A) == 0
    assert isinstance(one.acquire(4, tokens(64), domain=B), Grant), "the whole pool is the other's"


def test_a_domain_that_comes_back_finds_nothing() -> None:
    one = world(DomainConfig(A), DomainConfig(B))
    one.fill(1, tokens(16), domain=A)
    change(one, DomainConfig(B))
    change(one, DomainConfig(A), DomainConfig(B))
    assert one.granted(2, tokens(16), domain=A).num_cached_tokens == 0


def test_a_raised_guarantee_is_asked_back_from_who_borrowed() -> None:
    one = world(DomainConfig(A), DomainConfig(B))
    one.granted(1, tokens(48), domain=A)
    assert isinstance(one.acquire(2, tokens(32), domain=B), NoCapacity)
    assert not [said for said in one.told(one.session) if isinstance(said, Reclaim)]
    change(one, DomainConfig(A), DomainConfig(B, guarantee_share=0.5))
    assert isinstance(one.acquire(2, tokens(32), domain=B), NoCapacity)
    (asked,) = [said for said in one.told(one.session) if isinstance(said, Reclaim)]
    assert (asked.domain, asked.num_blocks) == (A, 4)
    one.release(1)
    assert isinstance(one.acquire(2, tokens(32), domain=B), Grant)


def test_a_lowered_maximum_stops_growth_and_ends_nobody() -> None:
    one = world(DomainConfig(A))
    one.granted(1, tokens(32), domain=A)
    change(one, DomainConfig(A, maximum_share=0.25))
    answer = one.extend(1, 40)
    assert isinstance(answer, NoCapacity)
    one.release(1)
    assert isinstance(one.acquire(2, tokens(16), domain=A), Grant)
    assert isinstance(one.acquire(3, tokens(4), domain=A), NoCapacity)


def test_a_need_of_before_does_not_outlive_its_guarantee() -> None:
    one = world(DomainConfig(A), DomainConfig(B, guarantee_share=0.5))
    one.granted(1, tokens(48), domain=A)
    one.acquire(2, tokens(32), domain=B)
    change(one, DomainConfig(A, guarantee_share=0.75), DomainConfig(B))
    assert not one.core.state.owed
    one.tick(5_000, alive=(one.session,))
    assert isinstance(one.extend(1, 52), Extended), "nobody takes what is its own by right now"


@pytest.mark.parametrize(
    "configs",
    [
        (DomainConfig(A, guarantee_share=0.6), DomainConfig(B, guarantee_share=0.6)),
        (DomainConfig(A), DomainConfig(A)),
        (DomainConfig(A, guarantee_blocks=17),),
    ],
)
def test_what_cannot_be_kept_changes_nothing(configs: tuple[DomainConfig, ...]) -> None:
    one = world(DomainConfig(A), DomainConfig(B, guarantee_share=0.5))
    one.fill(1, tokens(16), domain=A)
    before = one.core.state.settings
    with pytest.raises(SettingsRefused):
        one.core.set_domains(configs, one.now_ns)
    one.collect()
    assert one.core.state.settings is before
    assert one.granted(2, tokens(16), domain=A).num_cached_tokens


def test_a_worker_that_comes_later_has_the_new_shares() -> None:
    one = world(DomainConfig(A))
    change(one, DomainConfig(A, maximum_share=0.5), DomainConfig(B))
    one.core.receive_worker(cache_world.WorkerId("v"), registration(cache_world.WorkerId("v")), one.now_ns)
    one.collect()
    accounts = one.core.state.workers[cache_world.WorkerId("v")].quotas.accounts
    assert {domain: account.maximum for domain, account in accounts.items()} == {A: 8, B: 16}


@pytest.mark.parametrize("to", [DomainConfig(A), None])
def test_what_a_strict_domain_left_is_zeroed_for_others_all_the_same(to: DomainConfig | None) -> None:
    one = world(DomainConfig(A, Mode.STRICT, guarantee_share=1.0))
    one.fill(1, tokens(64), domain=A)
    change(one, *([to] if to else []), DomainConfig(B))
    one.tick(100, alive=(one.session,))
    granted = one.granted(2, tokens(64), domain=B)
    assert granted.zero == granted.owned


def test_a_domain_that_becomes_strict_is_forgotten_and_has_its_blocks_zeroed() -> None:
    one = world(DomainConfig(A), DomainConfig(B))
    one.fill(1, tokens(16), domain=A)
    change(one, DomainConfig(A, Mode.STRICT, guarantee_share=0.5), DomainConfig(B))
    granted = one.granted(2, tokens(16), domain=A)
    assert (granted.num_cached_tokens, granted.zero) == (0, granted.owned)
    assert isinstance(one.acquire(3, tokens(48), domain=B), NoCapacity), "its share is reserved"


CONFIG = st.builds(
    lambda mode, share, maximum: (
        (mode, share, 1.0) if mode is Mode.STRICT else (mode, min(share, maximum) if share > 0.1 else 0.0, maximum)
    ),
    st.sampled_from(list(Mode)),
    st.sampled_from([0.1, 0.2, 0.33]),
    st.sampled_from([0.25, 0.5, 1.0]),
)
CONFIGS = st.dictionaries(st.sampled_from([A, B, C]), CONFIG, min_size=1)
NUMBER = st.integers(0, 9)
STEP = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from([A, B, C]), st.integers(1, 40), st.integers(0, 2)),
    st.tuples(st.just("publish"), NUMBER),
    st.tuples(st.just("extend"), NUMBER, st.integers(1, 12)),
    st.tuples(st.just("release"), NUMBER),
    st.tuples(st.just("tick"), st.sampled_from([1, 300, 3_000])),
    st.tuples(st.just("change"), CONFIGS),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(first=CONFIGS, steps=st.lists(STEP, max_size=40))
def test_any_sequence_of_configurations_keeps_the_invariants(first: dict[DomainId, tuple], steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """`World.collect` has the core check all of them after each step."""

    def made(configs: dict[DomainId, tuple]) -> list[DomainConfig]:  # type: ignore[type-arg]
        return [DomainConfig(domain, *values) for domain, values in configs.items()]

    one = world(*made(first), num_blocks=20)
    live: dict[int, tuple[bytes, int]] = {}  # number: tokens, settled blocks
    for count, (kind, *values) in enumerate(steps):
        number = sorted(live)[values[0] % len(live)] if live and kind in ("publish", "extend", "release") else None
        if kind == "acquire":
            data = tokens(values[1], start=values[2])
            if isinstance(one.acquire(count, data, domain=values[0]), Grant):
                live[count] = data, 0
        elif kind == "tick":
            one.tick(values[0], alive=(one.session,))
            for fence in one.fences():
                one.ack(fence)
            one.log.clear()
        elif kind == "change":
            change(one, *made(values[0]))
        elif number is not None and kind == "publish":
            whole = len(live[number][0]) // 16 * 16
            one.do(Publish(lease_id(number), 0, live[number][0][:whole])) if whole else None
        elif number is not None and kind == "extend":
            one.extend(number, len(live[number][0]) // 4 + values[1])
        elif number is not None:
            one.do(Release(lease_id(number)))
            del live[number]
    for number in live:
        one.release(number)
    one.now_ns += 60_000 * MS
    one.tick(1, alive=(one.session,))
