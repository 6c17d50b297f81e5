"""What a client asked to keep goes after everything of lower priority in its domain, until its time is over."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Answer, Gone, Invalid, Retain, Retained
from coppice_cache.core.base.settings import DomainConfig, Eviction
from coppice_cache.core.ops.retention import DURATION_MS_MAX
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, settings, tokens

BLOCK = 4
PROMPT = tokens(16)
BOB = DomainId("bob")


@pytest.fixture(params=list(Eviction), ids=lambda eviction: eviction.value)
def here(request: pytest.FixtureRequest) -> World:
    return World(settings(eviction=request.param), num_blocks=8, block_size=BLOCK)


def kept(
    here: World, data: bytes = PROMPT, *, first: int = 0, end: int = 16, priority: int = 50, ms: int = 60_000
) -> int:
    """Publish PROMPT, retain a part, release; how many tokens are retained."""
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT)
    answer = retain(here, 1, 0, end, priority, ms)
    here.release(1)
    assert isinstance(answer, Retained), answer
    return answer.num_tokens


def retain(here: World, number: int, first: int, end: int, priority: int = 50, ms: int = 60_000) -> Answer:
    return here.do(Retain(lease_id(number), first, end, priority, ms))


def found(here: World, data: bytes = PROMPT) -> int:
    return here.core.match(ALICE, NAMESPACE, data + tokens(1, 9_000), W).num_cached_tokens


def press(here: World, count: int = 4, first: int = 10) -> None:
    """So many other prompts of four blocks, one after the other."""
    for number in range(first, first + count):
        here.fill(number, tokens(16, 1_000 * number))


def test_a_retained_prompt_outlives_newer_ones(here: World) -> None:
    assert kept(here) == 16
    press(here)
    assert found(here) == 16


def test_one_that_is_not_retained_does_not(here: World) -> None:
    here.fill(1, PROMPT)
    press(here)
    assert found(here) == 0


def test_a_range_keeps_its_blocks_and_what_leads_to_them(here: World) -> None:
    assert kept(here, end=7) == 7
    press(here)
    assert found(here) >= 8, "the block that the range ends in is kept whole"


def test_when_its_time_is_over_it_goes_like_others(here: World) -> None:
    kept(here, ms=5_000)
    here.tick(6_000, alive=(here.session,))
    press(here)
    assert found(here) == 0


def test_higher_priorities_go_later(here: World) -> None:
    kept(here, priority=20)
    here.granted(2, tokens(16, 500))
    here.publish(2, 0, tokens(16, 500))
    retain(here, 2, 0, 16, priority=80)
    here.release(2)
    here.fill(3, tokens(16, 700))
    assert found(here) == 0
    assert found(here, tokens(16, 500)) == 16


def test_a_retention_is_no_pin(here: World) -> None:
    kept(here)
    assert here.granted(9, tokens(32, 4_000)).owned, "without other memory it goes"


def test_priority_0_ends_it(here: World) -> None:
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT)
    retain(here, 1, 0, 16)
    retain(here, 1, 0, 16, priority=0, ms=0)
    here.release(1)
    press(here)
    assert found(here) == 0


def test_only_what_is_published_is_retained(here: World) -> None:
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT[:32])
    assert retain(here, 1, 0, 16) == Retained(lease_id(1), 8)
    assert retain(here, 1, 12, 16) == Retained(lease_id(1), 0)


def test_another_domains_need_comes_first() -> None:
    """Retention orders the leaves of one domain; a guarantee of another is above it (I13)."""
    here = World(settings(DomainConfig(BOB, guarantee_share=1.0)), num_blocks=8, block_size=BLOCK)
    kept(here)
    assert here.granted(5, tokens(32, 3_000), domain=BOB).owned


def test_ranges_and_priorities_that_mean_nothing_are_refused(here: World) -> None:
    here.granted(1, PROMPT)
    wrong: list[tuple[int, int, int, int]] = [
        (5, 5, 50, 1_000),
        (8, 4, 50, 1_000),
        (0, 8, 101, 1_000),
        (0, 8, 50, 0),
        (0, 8, 50, 1 << 60),
    ]
    for arguments in wrong:
        assert isinstance(retain(here, 1, *arguments), Invalid), arguments
    assert isinstance(retain(here, 77, 0, 8), Gone)


def test_after_an_invalidation_nothing_is_retained(here: World) -> None:
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    assert retain(here, 1, 0, 16) == Retained(lease_id(1), 0)


def test_both_parts_of_a_split_node_are_released_when_its_time_is_over(here: World) -> None:
    kept(here, ms=5_000)
    here.fill(2, PROMPT[:32] + tokens(8, 600))
    here.tick(6_000, alive=(here.session,))
    press(here)
    assert found(here) == 0


def test_what_is_published_after_a_retained_range_is_not_retained_with_it(here: World) -> None:
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT[:32])
    retain(here, 1, 0, 8)
    here.publish(1, 2, PROMPT[32:])
    here.release(1)
    press(here)
    assert found(here) == 8


def test_retaining_the_same_again_and_again_takes_no_memory(here: World) -> None:
    here.granted(1, PROMPT)
    here.publish(1, 0, PROMPT)
    for _ in range(500):
        retain(here, 1, 0, 16, ms=DURATION_MS_MAX)
    policy = here.core.state.workers[W].quotas.accounts[ALICE].eviction
    assert len(policy._expiries) < 200
    here.release(1)
    press(here)
    assert found(here) == 16
