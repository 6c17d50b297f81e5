"""The block that agrees in part, offered as a source to copy from."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId
from coppice.messages.index import Acquire, Candidate, Grant
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.radix.partial_match import ChildOrders, common_tokens
from coppice_cache.core.radix.tree import MatchPosition, Node, add_child
from tests.unit.cache import world as cache_world
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, lease_id, tokens

BLOCK = 8
PROMPT = tokens(24)
OTHER = tokens(8, 900)


def world(**changes: int) -> World:
    return World(num_blocks=changes.get("num_blocks", 32), block_size=BLOCK)


def ask(here: World, number: int, data: bytes, *, wants_copy: bool = True, domain: DomainId = ALICE) -> Grant:
    op = Acquire(
        lease_id(number), domain, NAMESPACE, data, len(data) // 4 + 1, (Candidate(W, 0),), wants_copy=wants_copy
    )
    answer = here.do(op)
    assert isinstance(answer, Grant), answer
    return answer


def cached(here: World) -> int:
    return here.core.stats().cached_blocks


def test_the_next_block_of_the_edge_agrees_in_part() -> None:
    here = world()
    here.fill(1, PROMPT)
    grant = ask(here, 2, PROMPT[:52] + OTHER)
    assert (grant.num_cached_tokens, grant.num_copy_tokens) == (8, 5)
    whole = ask(here, 3, PROMPT + OTHER)
    assert grant.copy_source == whole.shared[HANDLE_BYTES : 2 * HANDLE_BYTES]
    chain = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, BLOCK * 4)
    assert grant.copy_seal == chain[16:32]


def test_among_children_the_one_that_agrees_longest() -> None:
    here = world()
    for number, length in enumerate((0, 2, 6, 3)):
        here.fill(number, PROMPT[:32] + PROMPT[32 : 32 + 4 * length] + tokens(8 - length, 500 + 10 * number))
    grant = ask(here, 9, PROMPT)
    assert (grant.num_cached_tokens, grant.num_copy_tokens) == (8, 6)


def test_the_last_token_is_never_copied() -> None:
    here = world()
    here.fill(1, PROMPT)
    grant = ask(here, 2, PROMPT[:64])
    assert (grant.num_cached_tokens, grant.num_copy_tokens) == (8, 7), "the prompt ends with a block that is cached"


def test_nothing_is_offered_to_those_who_did_not_ask_or_have_nothing_in_common() -> None:
    here = world()
    here.fill(1, PROMPT)
    assert ask(here, 2, PROMPT[:52] + OTHER, wants_copy=False).copy_source == b""
    assert ask(here, 3, PROMPT[:32] + OTHER).copy_source == b""
    assert ask(here, 4, PROMPT[:36], domain=DomainId("bob")).copy_source == b""


def test_a_disabled_domain_copies_nothing() -> None:
    here = World(cache_world.settings(DomainConfig(ALICE, mode=Mode.DISABLED)), num_blocks=16, block_size=BLOCK)
    here.fill(1, PROMPT)
    assert ask(here, 2, PROMPT).copy_source == b""


def test_the_source_stays_until_the_lease_publishes_past_it() -> None:
    here = world(num_blocks=8)
    here.fill(1, PROMPT)
    grant = ask(here, 2, PROMPT[:52] + OTHER[:12])
    assert grant.num_copy_tokens == 5
    here.granted(3, tokens(16, 300))
    assert cached(here) == 3, "two blocks are left; three cached ones are held by the second pin"
    assert not isinstance(here.acquire(4, tokens(20, 700)), Grant)
    here.publish(2, 1, PROMPT[32:52] + OTHER[:12])
    assert isinstance(here.acquire(5, tokens(20, 800)), Grant), "the source could be evicted"


def test_the_source_is_let_go_with_the_lease() -> None:
    here = world(num_blocks=8)
    here.fill(1, PROMPT)
    ask(here, 2, PROMPT[:52] + OTHER)
    here.release(2)
    assert isinstance(here.acquire(3, tokens(60, 700)), Grant)


def test_what_is_copied_may_turn_out_to_be_the_same_block() -> None:
    here = world()
    here.fill(1, PROMPT)
    ask(here, 2, PROMPT[:52])
    answer = here.publish(2, 1, PROMPT[32:64])
    assert answer.num_published_blocks == 2  # type: ignore[union-attr]
    here.release(2)


def test_a_grant_without_room_for_the_second_pin_goes_without_a_copy() -> None:
    here = world(num_blocks=4)
    here.fill(1, PROMPT)
    grant = ask(here, 2, PROMPT[:52] + tokens(8, 600))
    assert grant.copy_source == b""
    assert grant.num_cached_tokens == 8


words = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(
    lambda row: b"".join(n.to_bytes(4, "little") for n in row)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(words, max_size=12), st.lists(words, max_size=12), words)
def test_the_nearest_child_is_the_best_of_all(first: list[bytes], later: list[bytes], wanted: bytes) -> None:
    orders, root = ChildOrders(), Node(None, b"", b"", 0)

    def hang_up(keys: list[bytes]) -> None:
        for key in keys:
            if key not in root.children:
                orders.added(root, key)
                add_child(root, key, bytes(8), block_bytes=16, now_ns=0)

    hang_up(first)
    orders.find(MatchPosition(root, 0, 0), wanted, 16)
    for key in first[::2]:
        if key in root.children:
            root.children[key].leave(16)
    hang_up(later)
    found = orders.find(MatchPosition(root, 0, 0), wanted, 16)
    best = max((common_tokens(key, wanted) for key in root.children), default=0)
    assert (found.num_tokens if found else 0) == best
    if found:
        alike = [child for key, child in root.children.items() if common_tokens(key, wanted) == best]
        assert found.node is alike[0], "the oldest, whatever its other tokens are"
