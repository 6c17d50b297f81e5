"""The tree alone: where walks end, and that splits keep what hangs below."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId, Namespace
from coppice_cache.core.radix import Tree, add_child, path, settle_spot, unprotected_blocks, walk
from tests.unit.cache_world import tokens

BLOCK = 16


def tree_of(count: int) -> Tree:
    tree = Tree(DomainId("d"), Namespace(b"n"), bytes(16), BLOCK)
    handles = b"".join(block.to_bytes(8, "little") for block in range(count))
    seals = b"".join(block.to_bytes(16, "little") for block in range(count))
    add_child(tree, tokens(4 * count), handles, seals, block_bytes=BLOCK, now_ns=1)
    return tree


@pytest.mark.parametrize("edge_blocks", [1, 2, 3, 7, 64])
def test_a_walk_ends_where_the_tokens_differ(edge_blocks: int) -> None:
    tree = tree_of(edge_blocks)
    for agreeing in range(4 * edge_blocks + 1):
        data = tokens(agreeing) + tokens(40, 10_000)
        spot = walk(tree, data, BLOCK)
        assert spot.num_blocks == agreeing // 4
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
    upper = settle_spot(walk(tree, tokens(4 * cut), BLOCK), BLOCK)
    assert (upper.num_blocks, lower.num_blocks) == (cut, 8 - cut)
    assert path(lower) == [upper, lower]
    assert (upper.guards, lower.guards, set(lower.pins)) == (1, 1, {5})
    assert walk(tree, tokens(33), BLOCK).num_blocks == 8
    assert b"".join(node.handles for node in path(lower)) == b"".join(b.to_bytes(8, "little") for b in range(8))
    assert lower.unpin(5) == 8
    assert (upper.guards, tree.guards) == (0, 0)


def test_what_a_pin_protects_is_known_before() -> None:
    tree = tree_of(8)
    spot = walk(tree, tokens(20), BLOCK)
    assert unprotected_blocks(spot) == 5
    upper = settle_spot(spot, BLOCK)
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
