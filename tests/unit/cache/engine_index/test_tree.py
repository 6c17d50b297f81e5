"""The advisory tree against a plain reference: what a source has said, walked block by block in dictionaries."""

from __future__ import annotations

import struct
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from coppice_cache.engine_index.core.keys import lora_tag, salt_tag
from coppice_cache.engine_index.core.tree import AdvisoryLimits, AdvisoryTree

BLOCK = 2
TIERS = ("GPU", "CPU")


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def stored(name: Any, parent: Any, *ids: int, **fields: Any) -> BlockStored:
    """Blocks of two tokens; their names are `name`, `name`+1, ..."""
    names = tuple(name + index for index in range(len(ids) // BLOCK))
    return BlockStored(names, parent, packed(*ids), BLOCK, **fields)


def matched(tree: AdvisoryTree, source: int, *ids: int, **namespace: bytes) -> int:
    return {hit.source: hit.tokens for hit in tree.match(packed(*ids), **namespace)}[source]


class Reference:
    """Of one source: which prefixes are on which tiers. A block is its whole prefix, so there are no parents."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, ...], set[str]] = {}

    def store(self, path: tuple[int, ...], tier: str) -> None:
        self.tiers.setdefault(path, set()).add(tier)

    def remove(self, path: tuple[int, ...], tier: str | None) -> None:
        left = self.tiers.get(path, set()) - ({tier} if tier else set(TIERS))
        if left:
            self.tiers[path] = left
        else:
            self.tiers.pop(path, None)

    def depth(self, path: tuple[int, ...], tier: str | None) -> int:
        for length in range(1, len(path) + 1):
            on = self.tiers.get(path[:length], set())
            if not on or (tier and tier not in on):
                return length - 1
        return len(path)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["store", "store", "store", "remove", "clear", "collect", "hide"]),
        PATHS,
        st.integers(0, 3),
        st.sampled_from(TIERS),
        st.booleans(),
    ),
    max_size=40,
)


def hash_of(path: tuple[int, ...], source: int) -> int:
    return int("".join(map(str, (source + 1, *path))), 4) - 5


def content(path: tuple[int, ...]) -> bytes:
    return b"".join(packed(step, 7) for step in path)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_every_order_of_events_gives_what_the_reference_says(actions: list[Any]) -> None:
    """Blocks come before their parents, go before their children, and are on one medium or two."""
    tree = AdvisoryTree()
    sources = [tree.open() for _ in range(3)]
    references = [Reference() for _ in range(3)]
    for index, kind, path, start, tier, everywhere in actions:
        source, reference = sources[index], references[index]
        assert source is not None
        if kind == "store":
            start = min(start, len(path) - 1)
            ends = [path[: end + 1] for end in range(start, len(path))]
            parent = hash_of(path[:start], index) if start else None
            names = tuple(hash_of(end, index) for end in ends)
            tokens = content(path)[8 * start :]
            tree.apply(source, BlockStored(names, parent, tokens, BLOCK, medium=tier))
            for end in ends:
                reference.store(end, tier)
        elif kind == "remove":
            gone = None if everywhere else tier
            tree.apply(source, BlockRemoved((hash_of(path, index),), gone))
            reference.remove(path, gone)
        elif kind == "clear":
            tree.apply(source, AllBlocksCleared())
            references[index] = Reference()
        elif kind == "collect":
            tree.collect(start)
        else:
            tree.set_visible(source, False)
            assert source not in {hit.source for hit in tree.match(content(path))}
            tree.set_visible(source, True)
        tree.check()
    for path in [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]:
        hits = tree.match(content(path))
        for index, hit in enumerate(hits):
            assert hit.tokens == BLOCK * references[index].depth(path, None)
            for tier in TIERS:
                assert hit.by_tier.get(tier, 0) == BLOCK * references[index].depth(path, tier)
    while tree.collect(1):
        tree.check()
    assert tree.num_garbage == 0


def one() -> tuple[AdvisoryTree, int]:
    tree = AdvisoryTree()
    source = tree.open()
    assert source is not None
    return tree, source


def test_one_walk_answers_for_all_whatever_they_call_their_blocks() -> None:
    tree, vllm = one()
    sglang, other = tree.open(), tree.open()
    assert sglang is not None
    assert other is not None
    tree.apply(vllm, BlockStored((b"a" * 32, b"b" * 32), None, packed(1, 2, 3, 4), 2, medium="GPU"))
    tree.apply(sglang, BlockStored((-5,), None, packed(1, 2), 2))
    hits = tree.match(packed(1, 2, 3, 4, 5))
    assert [(hit.source, hit.tokens, hit.by_tier) for hit in hits] == [
        (vllm, 4, {"GPU": 4}),
        (sglang, 2, {"GPU": 2}),
        (other, 0, {}),
    ]
    assert tree.num_nodes == 2, "the content is there once"


def test_a_parent_that_goes_first_hides_its_children_until_it_is_back() -> None:
    tree, source = one()
    tree.apply(source, stored(1, None, 1, 2, 3, 4))
    tree.apply(source, BlockRemoved((1,)))
    assert matched(tree, source, 1, 2, 3, 4) == 0
    tree.apply(source, stored(1, None, 1, 2))
    assert matched(tree, source, 1, 2, 3, 4) == 4


def test_a_block_before_its_parent_is_kept_apart_and_may_go_again_there() -> None:
    tree, source = one()
    tree.apply(source, stored(2, 1, 3, 4, 5, 6))
    tree.apply(source, stored(9, 3, 7, 8))
    assert (tree.counts(source).orphan_blocks, tree.num_nodes) == (3, 0)
    tree.apply(source, BlockRemoved((9,)))
    tree.apply(source, stored(1, None, 1, 2))
    assert matched(tree, source, 1, 2, 3, 4, 5, 6, 7, 8) == 6
    assert tree.counts(source).orphan_blocks == 0
    tree.check()


NAMESPACES: list[tuple[dict[str, Any], dict[str, bytes]]] = [
    ({}, {}),
    ({"lora_name": "X", "extra_keys": (("X",),)}, {"lora": lora_tag("X")}),
    ({"extra_keys": (("X",),)}, {"salt": salt_tag("X")}),
    ({"lora_name": "X", "extra_keys": (("X", "X"),)}, {"lora": lora_tag("X"), "salt": salt_tag("X")}),
    ({"lora_id": 3}, {"lora": lora_tag(None, 3)}),
    ({"lora_name": "id:3"}, {"lora": lora_tag("id:3")}),
    ({"cache_salt": "S"}, {"salt": salt_tag("S")}),
    ({"extra_keys": (((("salt", "T"), ("type", "cache_salt")),),)}, {"salt": salt_tag("T")}),
]


def test_an_adapter_a_salt_and_neither_never_meet() -> None:
    """Also where the engine gives all of them one name, as some versions of vLLM do for an adapter and a salt X."""
    for named in (range(100, 900, 100), [7] * len(NAMESPACES)):
        tree, source = one()
        other = tree.open()
        assert other is not None
        for index, ((fields, query), name) in enumerate(zip(NAMESPACES, named, strict=True)):
            owner = source if index % 2 else other
            if len(set(named)) > 1 or index < 4:
                tree.apply(owner, stored(name, None, 1, 2, **fields))
                hits = [hit.tokens for hit in tree.match(packed(1, 2), **query)]
                assert sum(hits) == 2, (fields, query)
            for _, unasked in NAMESPACES[index + 1 :]:
                assert sum(hit.tokens for hit in tree.match(packed(1, 2), **unasked)) == 0
        tree.check()


def test_a_child_goes_below_the_parent_of_its_own_namespace() -> None:
    tree, source = one()
    tree.apply(source, stored(1, None, 1, 2, lora_name="X"))
    tree.apply(source, stored(1, None, 1, 2, extra_keys=(("X",),)))
    tree.apply(source, stored(2, 1, 3, 4, lora_name="X"))
    assert matched(tree, source, 1, 2, 3, 4, lora=lora_tag("X")) == 4
    assert matched(tree, source, 1, 2, 3, 4, salt=salt_tag("X")) == 2
    tree.apply(source, BlockRemoved((1,)))
    assert matched(tree, source, 1, 2, 3, 4, lora=lora_tag("X")) == 0
    assert matched(tree, source, 1, 2, 3, 4, salt=salt_tag("X")) == 0


def test_one_name_in_two_namespaces_and_a_child_that_does_not_say_which_is_withheld() -> None:
    tree, source = one()
    tree.apply(source, stored(1, None, 1, 2, extra_keys=(("blue",),)))
    tree.apply(source, stored(1, None, 1, 2))
    tree.apply(source, stored(2, 1, 3, 4))
    assert matched(tree, source, 1, 2, 3, 4) == 2
    assert matched(tree, source, 1, 2, 3, 4, salt=salt_tag("blue")) == 2


def test_an_image_is_met_by_no_text() -> None:
    tree, source = one()
    tree.apply(source, stored(1, None, 1, 2, 3, 4, extra_keys=(None, (("picture", 0),))))
    assert matched(tree, source, 1, 2, 3, 4) == 2
    (node,) = [node for node in tree._contents[b"\0\0\0\0"].top.below() if len(node.key) % 4]
    ids = struct.unpack(f"<{len(node.key) // 4}I", node.key[: len(node.key) // 4 * 4])
    assert matched(tree, source, 1, 2, *ids, *range(10)) == 2


def test_every_group_of_layers_has_to_hold_the_prefix() -> None:
    tree, source = one()
    for group, ids in ((0, (1, 2, 3, 4)), (1, (1, 2))):
        tree.apply(source, stored(1, None, *ids, group_idx=group, kv_cache_spec_kind="full_attention"))
    tree.apply(source, stored(1, None, 1, 2, group_idx=2, kv_cache_spec_kind="sliding_window"))
    assert matched(tree, source, 1, 2, 3, 4) == 2
    tree.apply(source, BlockRemoved((1,), group_idx=0))
    assert matched(tree, source, 1, 2, 3, 4) == 0


def test_blocks_of_several_sizes_and_keys_that_look_ahead() -> None:
    tree, source = one()
    tree.apply(source, BlockStored((1,), None, packed(1, 2, 3, 4), 4))
    tree.apply(source, BlockStored((2,), None, packed(1, 2), 2))
    tree.apply(source, BlockStored((3,), 2, packed(9, 9), 2))
    tree.apply(source, BlockStored((4,), 1, packed(5, 6), 2, lookahead=(packed(7),)))
    assert matched(tree, source, 1, 2, 9, 9) == 4
    assert matched(tree, source, 1, 2, 3, 4, 5, 6, 7) == 6
    assert matched(tree, source, 1, 2, 3, 4, 5, 6, 8) == 4
    tree.apply(source, BlockStored((5,), 1, packed(5, 6, 7), 3))
    assert matched(tree, source, 1, 2, 3, 4, 5, 6, 7) == 7
    tree.check()


def test_limits_withhold_and_count() -> None:
    tree = AdvisoryTree(
        AdvisoryLimits(
            sources_max=1, blocks_per_source_max=3, nodes_max=40, orphan_blocks_max=2, shapes_max=1, groups_max=2
        )
    )
    source = tree.open()
    assert source is not None
    assert tree.open() is None
    tree.apply(source, stored(1, None, 1, 2, 3, 4, 5, 6))
    tree.apply(source, stored(9, None, 8, 8))
    tree.apply(source, BlockStored((30,), None, packed(1, 2, 3), 3))
    tree.apply(source, BlockStored((31, 32), None, packed(1, 2), 2))  # which of the two has the tokens?
    assert tree.counts(source).withheld_blocks == 4
    tree.apply(source, BlockRemoved((3,)))
    for name in (50, 60, 70):
        tree.apply(source, stored(name, 40 + name, 1, 1))
    assert (tree.counts(source).orphan_blocks, tree.counts(source).withheld_blocks) == (2, 5)
    tree.apply(source, stored(80, None, 1, 1, group_idx=1))
    tree.apply(source, stored(81, None, 1, 1, group_idx=2))
    tree.check()
    assert matched(tree, source, 1, 2, 3, 4, 5, 6) == 4


def test_a_crowd_of_orphans_is_bounded() -> None:
    tree, source = one()
    for name in range(1_000):
        tree.apply(source, stored(name, "root", name, 1))  # type: ignore[arg-type]
    assert tree.counts(source).orphan_blocks < 100


@pytest.mark.parametrize("medium", ["GPU", None])
def test_bits_come_back(medium: str | None) -> None:
    tree, source = one()
    for _ in range(50):
        tree.apply(source, stored(1, None, 1, 2, 3, 4, medium=medium))
        tree.apply(source, AllBlocksCleared())
        assert matched(tree, source, 1, 2) == 0
    while tree.collect(10):
        pass
    assert tree.num_nodes == 0
    assert tree._num_bits <= 6
