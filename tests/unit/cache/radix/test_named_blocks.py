"""Blocks that are published by their number: their tokens are those that the lease's Acquire named."""

from __future__ import annotations

from coppice.messages.index import Answer, Invalid, NotPublished, NotPublishedReason, Publish, Published
from tests.unit.cache.restart import S1, Pool, Restarted, claim, handle
from tests.unit.cache.world import ALICE, World, lease_id, tokens

PROMPT = tokens(14)  # three blocks and a half
WHOLE = 3


def publish(here: World, first: int, named: int, data: bytes = b"", number: int = 1) -> Answer:
    return here.do(Publish(lease_id(number), first, data, named))


def world(data: bytes = PROMPT) -> World:
    here = World(num_blocks=16)
    here.granted(1, data, reserve=24)
    return here


def test_they_are_found_with_the_seals_that_their_tokens_give() -> None:
    counted, said = world(), world()
    answer = publish(counted, 0, WHOLE)
    assert answer == publish(said, 0, 0, PROMPT[: WHOLE * 16])
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == WHOLE
    assert counted.granted(2, PROMPT).num_cached_tokens == 12


def test_said_again_they_get_the_same_answer_and_change_nothing() -> None:
    here = world()
    first = publish(here, 0, 2)
    assert publish(here, 0, 2) == first
    last = publish(here, 1, 2)
    assert publish(here, 1, 2) == last, "the tokens of the acquire are kept no more, and nobody needs them"
    assert publish(here, 0, 0, PROMPT[:32]) == publish(here, 0, 2)


def test_what_follows_the_prompt_is_said_behind_them() -> None:
    here = world()
    output = tokens(2, 500) + tokens(4, 600)
    answer = publish(here, 0, WHOLE, PROMPT[WHOLE * 16 :] + output)
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == 5
    assert here.granted(2, PROMPT + output + tokens(1)).num_cached_tokens == 20
    assert publish(here, 1, 2, PROMPT[WHOLE * 16 :] + output) == publish(here, 1, 0, (PROMPT + output)[16:])
    other = publish(here, 1, 2, PROMPT[WHOLE * 16 :] + tokens(6, 900))
    assert isinstance(other, Invalid), "other tokens under blocks that are published"


def test_after_a_match_they_are_counted_from_there() -> None:
    here = World(num_blocks=16)
    here.fill(7, PROMPT[:16])
    assert here.granted(1, PROMPT).num_cached_tokens == 4
    assert isinstance(publish(here, 1, 2), Published)
    assert here.granted(2, PROMPT).num_cached_tokens == 12


def test_more_than_the_acquire_named_is_refused_and_changes_nothing() -> None:
    here = world()
    before = here.core.stats()
    for first, named, data in ((0, 4, b""), (0, 4, tokens(4)), (0, 1 << 70, b""), (1, 2, b"")):
        assert isinstance(publish(here, first, named, data), Invalid)
    assert here.core.stats() == before
    assert isinstance(publish(here, 0, WHOLE), Published)
    assert isinstance(publish(here, WHOLE, 1), Invalid), "all of the prompt is published: what follows must be said"


def test_who_published_other_tokens_has_named_nothing() -> None:
    here = world()
    assert isinstance(publish(here, 0, 0, tokens(4, 900)), Published)
    assert isinstance(publish(here, 1, 1), Invalid)
    assert isinstance(publish(here, 1, 0, PROMPT[16:32]), Published)


def test_after_an_invalidation_they_are_no_more_published_than_others() -> None:
    here = world()
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    gone = NotPublished(lease_id(1), NotPublishedReason.TREE_GONE)
    assert publish(here, 0, WHOLE) == publish(here, 0, WHOLE) == gone


def test_nobody_kept_the_tokens_of_a_lease_that_came_back_after_a_restart() -> None:
    here = Restarted(Pool(), S1, attach=(S1,))
    here.session = S1
    here.claims(S1, claim(1, owned=handle(0, 5) + handle(1, 5)))
    here.open()
    assert isinstance(publish(here, 0, 1), Invalid)
    assert isinstance(publish(here, 0, 0, PROMPT[:16]), Published)
    assert isinstance(publish(here, 0, 1, PROMPT[16:32]), Published), "but what is published is known"
