"""An Acquire of somebody who will compute every token: it shares nothing and publishes as others do."""

from __future__ import annotations

from coppice.messages.index import Acquire, Candidate, Grant, Publish, Published
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, tokens

PROMPT = tokens(12)


def ask(here: World, number: int, data: bytes = PROMPT, **flags: bool) -> Grant:
    op = Acquire(lease_id(number), ALICE, NAMESPACE, data, len(data) // 4, (Candidate(W, 0),), **flags)
    answer = here.do(op)
    assert isinstance(answer, Grant), answer
    return answer


def test_it_owns_all_its_blocks_where_others_share() -> None:
    here = World(num_blocks=16)
    here.fill(1, PROMPT)
    before = here.core.stats()
    assert ask(here, 2).num_cached_tokens == 8
    grant = ask(here, 3, skip_match=True, wants_copy=True)
    assert (grant.num_cached_tokens, grant.shared, grant.copy_source) == (0, b"", b"")
    assert len(grant.owned) == 3 * 8
    assert here.core.stats().cached_blocks == before.cached_blocks


def test_it_does_not_wait_for_anothers_prefill() -> None:
    here = World(num_blocks=16)
    ask(here, 1)
    assert ask(here, 2, skip_match=True, may_wait=True).num_cached_tokens == 0


def test_what_is_cached_already_it_keeps_as_its_own_until_it_ends() -> None:
    here = World(num_blocks=16)
    here.fill(1, PROMPT[:32])
    grant = ask(here, 2, skip_match=True)
    answer = here.do(Publish(lease_id(2), 0, PROMPT))
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == 3
    assert answer.handles == grant.owned[16:]  # the last block alone was new
    assert ask(here, 3, PROMPT + PROMPT[:4]).shared[16:] == grant.owned[16:]
    here.core.check()
