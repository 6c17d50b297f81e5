"""Quotas: who may hold how much, and at whose expense."""

from __future__ import annotations

from random import Random

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Grant, NoCapacity, NoCapacityReason
from coppice_cache.core.base.errors import MessageRefused, SettingsRefused
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from tests.unit.cache.world import ALICE, W, World, cached, reason, registration, settings, tokens

BOB, CAROL = DomainId("bob"), DomainId("carol")
STRICT = Mode.STRICT


def test_a_domain_never_holds_more_than_its_maximum() -> None:
    world = World(settings(DomainConfig(ALICE, maximum_share=0.5)), num_blocks=16)
    world.granted(1, tokens(24))
    assert reason(world.acquire(2, tokens(12, 900))) is NoCapacityReason.DOMAIN_MAXIMUM
    assert reason(world.acquire(2, tokens(36, 900))) is NoCapacityReason.NEVER_FITS
    assert reason(world.extend(1, 36)) is NoCapacityReason.NEVER_FITS
    world.granted(3, tokens(8, 900))
    assert reason(world.extend(1, 28)) is NoCapacityReason.DOMAIN_MAXIMUM


def test_at_its_maximum_a_domain_evicts_its_own() -> None:
    world = World(settings(DomainConfig(ALICE, maximum_share=0.5)), num_blocks=16)
    world.fill(1, tokens(16))
    world.fill(2, tokens(16), domain=BOB)
    world.granted(3, tokens(24, 900))
    assert (cached(world, tokens(16)), cached(world, tokens(16), BOB)) == (2, 4)


def test_the_domain_furthest_over_its_guarantee_pays_first() -> None:
    config = settings(DomainConfig(ALICE, guarantee_share=0.5), DomainConfig(BOB))
    world = World(config, num_blocks=16)
    world.fill(1, tokens(40), domain=ALICE)  # 10 held, 2 over
    world.fill(2, tokens(20), domain=BOB)  # 5 held, 5 over
    world.granted(3, tokens(12, 900), domain=CAROL)
    assert (cached(world, tokens(40), ALICE), cached(world, tokens(20), BOB)) == (10, 3)


def test_nobody_takes_from_a_guarantee() -> None:
    world = World(settings(DomainConfig(ALICE, guarantee_share=0.5)), num_blocks=16)
    world.fill(1, tokens(40))
    assert reason(world.acquire(2, tokens(36, 900), domain=BOB)) is NoCapacityReason.NEVER_FITS, "no wait would help"
    world.granted(3, tokens(4, 1_900), domain=CAROL)
    assert reason(world.acquire(2, tokens(36, 900), domain=BOB)) is NoCapacityReason.POOL_FULL, "something is out"
    world.release(3)
    assert cached(world, tokens(40)) == 10
    world.granted(3, tokens(32, 900), domain=BOB)
    assert cached(world, tokens(40)) == 8


def test_a_domain_may_always_evict_its_own() -> None:
    world = World(settings(DomainConfig(ALICE, guarantee_share=0.5)), num_blocks=16)
    world.fill(1, tokens(32))
    world.granted(2, tokens(32, 900), domain=BOB)
    world.granted(3, tokens(32, 1_900))
    assert cached(world, tokens(32)) == 0


def test_borrowed_blocks_come_back_to_the_guaranteed_domain() -> None:
    world = World(settings(DomainConfig(ALICE, guarantee_share=0.5)), num_blocks=16)
    world.fill(1, tokens(64), domain=BOB)
    assert len(world.granted(2, tokens(32)).owned) == 64
    assert cached(world, tokens(64), BOB) == 8


def test_a_strict_share_is_never_lent() -> None:
    world = World(settings(DomainConfig(ALICE, mode=STRICT, guarantee_share=0.25)), num_blocks=16)
    assert reason(world.acquire(1, tokens(52), domain=BOB)) is NoCapacityReason.NEVER_FITS
    world.granted(2, tokens(48), domain=BOB)
    assert reason(world.acquire(3, tokens(4, 900), domain=BOB)) is NoCapacityReason.POOL_FULL
    world.granted(4, tokens(16))
    assert reason(world.acquire(5, tokens(4, 900))) is NoCapacityReason.DOMAIN_MAXIMUM
    assert reason(world.acquire(5, tokens(20, 900))) is NoCapacityReason.NEVER_FITS


def test_a_strict_domain_sees_only_itself() -> None:
    """Non-interference: the same ops get the same answers, whatever the others do in between."""
    config = settings(DomainConfig(ALICE, mode=STRICT, guarantee_share=0.5), DomainConfig(BOB, guarantee_share=0.2))

    def transcript(noise: int) -> list[object]:
        world, random, others = World(config, num_blocks=20), Random(5), Random(noise)
        heard: list[object] = []
        for number in range(120):
            start = world.now_ns
            for step in range(others.randrange(4) if noise else 0):
                other = 10_000 + number * 10 + step
                whose = others.choice((BOB, CAROL))
                answer = world.acquire(other, tokens(others.randint(1, 40), others.randrange(3) * 4), domain=whose)
                if isinstance(answer, Grant) and others.random() < 0.8:
                    world.release(other)
            world.now_ns = start + 10_000_000
            data = tokens(random.randint(1, 40), random.randrange(3) * 4)
            answer = world.acquire(number, data)
            if isinstance(answer, Grant):
                heard.append((answer.num_cached_tokens, len(answer.shared), len(answer.owned), len(answer.zero)))
                whole = len(data) // 16 * 16
                if whole:
                    world.publish(number, 0, data[:whole])
                if random.random() < 0.8:
                    world.release(number)
            else:
                heard.append(answer)
            heard.append([cached(world, tokens(40, first)) for first in (0, 4, 8)])
        return heard

    alone = transcript(0)
    assert any(isinstance(answer, NoCapacity) for answer in alone)
    assert all(transcript(noise) == alone for noise in (1, 2, 3))


def test_many_domains_take_turns_to_pay() -> None:
    world = World(num_blocks=64)
    names = [DomainId(f"d{n}") for n in range(8)]
    for number, name in enumerate(names):
        world.fill(number, tokens(32), domain=name)
    for number in range(20, 36):
        world.fill(number, tokens(8, number * 100), domain=CAROL)
        if number < 30:
            held = [cached(world, tokens(32), name) for name in names]
            assert max(held) - min(held) <= 2
    assert world.core.stats().cached_blocks == 64


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CoreSettings(b"short"), "seal_key"),
        (lambda: settings(DomainConfig(ALICE), DomainConfig(ALICE)), "twice"),
        (lambda: settings(*(DomainConfig(d, guarantee_share=0.6) for d in (ALICE, BOB))), "sum"),
        (lambda: settings(default_domain=DomainConfig(ALICE, guarantee_share=0.1)), "default_domain"),
        (lambda: settings(heartbeat_ms=10_000), "heartbeat_ms"),
        (lambda: settings(session_ttl_ms=0), "session_ttl_ms"),
        (lambda: DomainConfig(ALICE, guarantee_share=0.5, maximum_share=0.4), "above"),
        (lambda: DomainConfig(ALICE, maximum_share=1.5), "between"),
        (lambda: DomainConfig(ALICE, mode=STRICT), "strict"),
        (lambda: DomainConfig(ALICE, guarantee_blocks=2, maximum_blocks=1), "above"),
        (lambda: DomainConfig(ALICE, guarantee_blocks=-1), "negative"),
        (lambda: DomainConfig(ALICE, mode=STRICT, guarantee_blocks=2, maximum_blocks=3), "strict"),
        (lambda: DomainConfig(ALICE, mode=STRICT, guarantee_share=0.2, maximum_share=0.4), "strict"),
    ],
)
def test_settings_that_contradict_themselves(build: object, message: str) -> None:
    with pytest.raises(SettingsRefused, match=message):
        build()  # type: ignore[operator]


def test_limits_in_blocks() -> None:
    config = settings(
        DomainConfig(ALICE, guarantee_blocks=6, maximum_blocks=8), DomainConfig(BOB, mode=STRICT, guarantee_blocks=4)
    )
    world = World(config, num_blocks=16)
    world.granted(1, tokens(32))
    assert reason(world.acquire(2, tokens(4, 900))) is NoCapacityReason.DOMAIN_MAXIMUM
    assert reason(world.acquire(2, tokens(36, 900))) is NoCapacityReason.NEVER_FITS
    world.granted(3, tokens(16), domain=BOB)
    assert reason(world.acquire(4, tokens(4, 900), domain=BOB)) is NoCapacityReason.DOMAIN_MAXIMUM
    assert DomainConfig(ALICE, guarantee_share=0.5, guarantee_blocks=3).guarantee_of(10) == 8
    assert DomainConfig(ALICE, maximum_share=0.5, maximum_blocks=30).maximum_of(10) == 5


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (
            (DomainConfig(ALICE, guarantee_blocks=12), DomainConfig(BOB, guarantee_share=0.5)),
            r"sum to 20 blocks \(alice 12, bob 8\); this pool has 16",
        ),
        ((DomainConfig(ALICE, guarantee_blocks=8, maximum_share=0.25),), "alice: of 16 blocks .* 8, at most 4"),
    ],
)
def test_a_worker_that_cannot_keep_what_was_promised_is_refused(
    configs: tuple[DomainConfig, ...], message: str
) -> None:
    world = World(settings(*configs))
    with pytest.raises(MessageRefused, match=message):
        world.core.receive_worker(W, registration(num_blocks=16), world.now_ns)
    assert not world.core.state.workers
    world.core.receive_worker(W, registration(num_blocks=64), world.now_ns)
    assert world.core.state.workers
