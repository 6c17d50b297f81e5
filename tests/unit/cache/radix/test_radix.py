"""The tree alone: where walks end, and that splits keep what hangs below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace
from coppice.seals import NO_CHAIN_KEY
from coppice_cache.core.radix import tree as radix
from coppice_cache.core.radix.sharded_dict import SHARDED_FROM, ShardedDict
from coppice_cache.core.radix.tree import Tree, add_child, path, split_edge, unprotected_blocks, walk
from tests.unit.cache.world import ALICE, World, settings, tokens

BLOCK = 16


def tree_of(count: int) -> Tree:
    tree = Tree(DomainId("d"), Namespace(b"n"), NO_CHAIN_KEY, BLOCK)
    handles = b"".join(block.to_bytes(8, "little") for block in range(count))
    add_child(tree, tokens(4 * count), handles, block_bytes=BLOCK, now_ns=1)
    return tree


@pytest.mark.parametrize("edge_blocks", [1, 2, 3, 7, 64])
def test_a_walk_ends_where_the_tokens_differ(edge_blocks: int) -> None:
    tree = tree_of(edge_blocks)
    for agreeing in range(4 * edge_blocks + 1):
        data = tokens(agreeing) + tokens(40, 10_000)
        position = walk(tree, data, BLOCK)
        assert position.num_blocks == agreeing // 4
        assert walk(tree, tokens(agreeing), BLOCK).num_blocks == agreeing // 4


def test_a_walk_ends_with_the_tokens() -> None:
    tree = tree_of(8)
    assert walk(tree, b"", BLOCK).num_blocks == 0
    assert walk(tree, tokens(3), BLOCK).num_blocks == 0
    assert walk(tree, tokens(9), BLOCK).num_blocks == 2
    assert walk(tree, tokens(64), BLOCK).num_blocks == 8


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_split_keeps_the_lower_nodes_identity(cut: int) -> None:
    tree = tree_of(8)
    (lower,) = tree.children.values()
    assert lower.pin(5) == 8
    upper = split_edge(walk(tree, tokens(4 * cut), BLOCK), BLOCK)
    assert (upper.num_blocks, lower.num_blocks) == (cut, 8 - cut)
    assert path(lower) == [upper, lower]
    assert (upper.guards, lower.guards, set(lower.pins)) == (1, 1, {5})
    assert walk(tree, tokens(33), BLOCK).num_blocks == 8
    assert b"".join(node.handles for node in path(lower)) == b"".join(b.to_bytes(8, "little") for b in range(8))
    assert lower.unpin(5) == 8
    assert (upper.guards, tree.guards) == (0, 0)


def test_what_a_pin_protects_is_known_before() -> None:
    tree = tree_of(8)
    position = walk(tree, tokens(20), BLOCK)
    assert unprotected_blocks(position) == 5
    upper = split_edge(position, BLOCK)
    assert upper.pin(1) == 5
    assert unprotected_blocks(walk(tree, tokens(12), BLOCK)) == 0
    assert unprotected_blocks(walk(tree, tokens(28), BLOCK)) == 2
    assert upper.pin(2) == 0
    assert upper.unpin(1) == 0
    assert upper.unpin(2) == 5


def test_trimming_takes_the_tail_and_then_the_node() -> None:
    tree = tree_of(4)
    (node,) = tree.children.values()
    assert node.trim(1, BLOCK) == (3).to_bytes(8, "little")
    assert walk(tree, tokens(16), BLOCK).num_blocks == 3
    node.trim(3, BLOCK)
    assert tree.is_unused
    assert node.parent is None
    assert not node.is_evictable


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=2)), max_size=200))
def test_a_dict_in_parts_is_a_dict(changes: list[tuple[bool, bytes]]) -> None:
    plain: dict[bytes, int] = {b"first": 0}
    parts: ShardedDict[int] = ShardedDict(plain)
    for number, (keeps, key) in enumerate(changes):
        if keeps:
            plain[key] = parts[key] = number
        elif key in plain:
            del plain[key], parts[key]
        assert (key in parts, parts.get(key), len(parts), bool(parts)) == (
            key in plain,
            plain.get(key),
            len(plain),
            bool(plain),
        )
    assert dict(parts.items()) == plain
    assert sorted(parts) == sorted(plain)
    assert sorted(parts.values()) == sorted(plain.values())


def test_a_node_with_very_many_children_keeps_them_in_parts() -> None:
    tree = Tree(DomainId("d"), Namespace(b"n"), NO_CHAIN_KEY, BLOCK)
    keys = [number.to_bytes(BLOCK, "little") for number in range(SHARDED_FROM + 5)]
    nodes = [add_child(tree, key, bytes(8), block_bytes=BLOCK, now_ns=1) for key in keys]
    assert isinstance(tree.children, ShardedDict)
    assert [walk(tree, key, BLOCK).node for key in keys] == nodes
    for node in nodes:
        node.leave(BLOCK)
    assert tree.is_unused


def test_audits_snapshots_and_invalidations_reach_all_children_of_a_wide_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "SHARDED_FROM", 3)
    here = World(settings(record_events=True), num_blocks=64, block_size=4)
    for number in range(10):
        here.fill(number, tokens(8, 100 * number))
    (tree,) = here.core.state.workers[here.granted(99, tokens(4, 9_000)).worker_id].trees.values()
    assert isinstance(tree.children, ShardedDict)
    here.core.check()
    told, cursor = here.core.snapshot_slice(None, 4)
    while cursor is not None:
        more, cursor = here.core.snapshot_slice(cursor, 4)
        told += more
    assert sum(len(stored.handles) // 8 for stored in told) == 20
    here.release(99)
    here.core.invalidate(domain=ALICE, now_ns=here.now_ns)
    here.tick(1_000, alive=(here.session,))
    assert here.core.stats().cached_blocks == 0
