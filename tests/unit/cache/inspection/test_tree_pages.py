"""Trees in pages: together they are the whole, whatever their size; changes in between are survived or said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId, WorkerId
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import NodeView, TreeDump
from coppice_cache.core.inspection import tree_pages
from tests.unit.cache.world import ALICE, NAMESPACE, World, registration, tokens

BLOCK = 4
Named = tuple[str, bytes, NodeView]


def dump(world: World, token: str = "", *, depth: int = 99, limit: int = 999, worker: str = "") -> TreeDump:
    who = WorkerId(worker) if worker else None
    return world.core.tree(ALICE, max_depth=depth, limit=limit, page_token=token, worker_id=who)


def nodes(*dumps: TreeDump) -> list[Named]:
    return [(tree.worker_id, tree.namespace, node) for page in dumps for tree in page.trees for node in tree.nodes]


def pages(world: World, depth: int, limit: int) -> list[TreeDump]:
    found = [dump(world, depth=depth, limit=limit)]
    while found[-1].next_page_token:
        found.append(dump(world, found[-1].next_page_token, depth=depth, limit=limit))
        assert len(found) < 500
    return found


def two_workers() -> World:
    world = World(num_blocks=200, block_size=BLOCK)
    world.register(registration(WorkerId("v"), num_blocks=200, block_size=BLOCK))
    return world


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    limit=st.integers(1, 9),
    depth=st.integers(0, 6),
    listed_from=st.sampled_from([1, 4_096]),
)
def test_all_pages_are_the_whole(prompts: list[list[int]], limit: int, depth: int, listed_from: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_pages, "_LISTED_FROM", listed_from)
        world = two_workers()
        for number, blocks in enumerate(prompts):
            data = b"".join(tokens(BLOCK, 10 * block) for block in blocks)
            where = ("w", "v")[number % 2]
            world.fill(number, data, candidates=((where, 0),))
        whole = dump(world, depth=depth)
        found = pages(world, depth, limit)
        assert nodes(*found) == nodes(whole)
        assert any(page.cut_by_depth for page in found) == whole.cut_by_depth
        assert all(len(nodes(page)) <= limit and not page.moved for page in found)
        assert not any(page.next_page_token and not nodes(page) for page in found)


def test_parents_and_places_are_named() -> None:
    world = World(num_blocks=64, block_size=BLOCK)
    world.fill(1, tokens(4 * BLOCK))
    world.fill(2, tokens(2 * BLOCK) + tokens(BLOCK, 90))
    root, upper, *lower = [node for _, _, node in nodes(dump(world))]
    assert (root.node, root.parent, root.num_blocks, root.depth) == ("", "", 0, 0)
    assert (upper.parent, upper.first_block, upper.num_blocks, upper.num_children) == ("", 0, 2, 2)
    assert [(node.parent, node.first_block, node.depth) for node in lower] == [(upper.node, 2, 2)] * 2
    assert sorted(node.num_blocks for node in lower) == [1, 2]


def siblings(count: int = 8) -> World:
    world = World(num_blocks=64, block_size=BLOCK)
    for number in range(count):
        world.fill(number, tokens(BLOCK, 100 * number))
    return world


def forget(world: World, number: int) -> None:
    world.core.invalidate(now_ns=world.now_ns, domain=ALICE, namespace=NAMESPACE, tokens=tokens(BLOCK, 100 * number))


def test_siblings_that_went_before_move_nothing() -> None:
    world = siblings()
    first = dump(world, limit=5)
    forget(world, 0)
    forget(world, 2)
    rest = dump(world, first.next_page_token)
    assert not rest.moved
    assert len(nodes(first)) + len(nodes(rest)) == 9


def test_a_page_goes_on_where_its_node_is_gone_and_says_so() -> None:
    world = siblings()
    first = dump(world, limit=5)
    forget(world, 3)
    rest = dump(world, first.next_page_token)
    assert rest.moved
    assert len(nodes(first)) + len(nodes(rest)) == 9


def test_new_siblings_come_last() -> None:
    world = siblings()
    first = dump(world, limit=5)
    world.fill(20, tokens(BLOCK, 5_000))
    assert len(nodes(first, dump(world, first.next_page_token))) == 10


def test_a_tree_that_is_gone_is_said() -> None:
    world = siblings()
    first = dump(world, limit=5)
    world.core.invalidate(now_ns=world.now_ns, domain=ALICE)
    assert dump(world, first.next_page_token) == TreeDump(ALICE, (), "", False, True)


def test_one_worker_of_two() -> None:
    world = two_workers()
    world.fill(1, tokens(BLOCK), candidates=(("w", 0),))
    world.fill(2, tokens(BLOCK), candidates=(("v", 0),))
    assert {worker for worker, _, _ in nodes(dump(world, worker="v"))} == {"v"}
    assert [worker for worker, _, _ in nodes(dump(world))] == ["v", "v", "w", "w"]


def test_nothing_is_there() -> None:
    world = World(num_blocks=8, block_size=BLOCK)
    assert world.core.tree(DomainId("nobody"), max_depth=3, limit=3).trees == ()


@pytest.mark.parametrize("token", ["x", "AAAA", "W10=", "WyJ3IiwgIjAwIiwgW1stMSwgIiJdXV0=", "é", "WzEsMiwzXQ=="])
def test_a_page_token_of_somebody_else_is_refused(token: str) -> None:
    with pytest.raises(MessageRefused, match="page token"):
        dump(siblings(2), token)
