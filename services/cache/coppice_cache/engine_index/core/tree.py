"""An advisory tree: what the engines of a fleet say they have cached, found again by token content.

    namespace (LoRA, salt)
      |- block "the quick"    held by  A/gpu  A/any  B/cpu  B/any       one node per block content, one bit per holder
      |    |- block "brown"   held by  A/gpu  A/any
      |    `- block "red"     held by                B/cpu  B/any

Engines name the same content differently, so their hashes only serve to find a block again that the same engine names:
a parent, or a block that it drops. One walk answers for all sources: the mask of holders shrinks on the way down, and
where a bit goes out, that source's prefix ends. A block whose parent its source has dropped is thus not reachable until
the parent is stored again. Nothing here owns or pins anything: a hit is a hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coppice.messages.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent
from coppice_cache.engine_index.core.keys import block_keys, content_key, namespace_of, tier_of
from coppice_cache.engine_index.core.nodes import Content, Holding, Node, Orphan, Source

SourceId = int
# A prefix is usable when these hold all of it. Groups with a window, or with a state, drop blocks that they don't need.
WHOLE_PREFIX_KINDS = {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}


@dataclass(frozen=True, slots=True)
class AdvisoryLimits:
    """What is over a limit is withheld: not found, and counted."""

    sources_max: int = 1_024
    blocks_per_source_max: int = 1_000_000
    nodes_max: int = 4_000_000
    orphan_blocks_max: int = 65_536
    shapes_max: int = 16
    groups_max: int = 32
    tiers_max: int = 8
    nodes_per_hash_max: int = 4


@dataclass(frozen=True, slots=True)
class SourceMatch:
    """tokens: cached prefix on any medium. by_tier: on that medium alone."""

    source: SourceId
    tokens: int
    by_tier: dict[str, int]


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """orphan_blocks: wait for a parent that we don't know. withheld_blocks: over a limit, or without a sure place."""

    blocks: int
    orphan_blocks: int
    withheld_blocks: int
    by_tier: tuple[str, ...]


class AdvisoryTree:
    """Blocks of all sources. Not safe for threads: the caller has the lock."""

    def __init__(self, limits: AdvisoryLimits | None = None) -> None:
        self._limits = limits or AdvisoryLimits()
        self._contents: dict[bytes, Content] = {}
        self._sources: dict[SourceId, Source] = {}
        self._next_source = 0
        self._shapes: dict[tuple[int, int], None] = {}  # (bytes that a block advances, bytes of its key), in order
        self._visible = 0
        self._num_nodes = 0
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._garbage: list[Holding] = []

    # ---- sources ----

    def open(self) -> SourceId | None:
        """A new source without blocks, visible; None when there are too many."""
        if len(self._sources) >= self._limits.sources_max:
            return None
        self._next_source += 1
        self._sources[self._next_source] = Source()
        return self._next_source

    def clear(self, source: SourceId) -> None:
        """Its blocks are unfindable at once; their memory comes back with `collect`."""
        held = self._sources[source]
        for holding in held.holdings.values():
            self._visible &= ~holding.all_bits
            self._garbage.append(holding)
        self._sources[source] = Source(is_visible=held.is_visible, num_withheld=held.num_withheld)

    def close(self, source: SourceId) -> None:
        self.clear(source)
        del self._sources[source]

    def set_visible(self, source: SourceId, is_visible: bool) -> None:
        """What is not visible is withheld from every match, but kept."""
        held = self._sources[source]
        held.is_visible = is_visible
        for holding in held.holdings.values():
            self._visible = self._visible | holding.all_bits if is_visible else self._visible & ~holding.all_bits

    def counts(self, source: SourceId) -> SourceCounts:
        held = self._sources[source]
        tiers = sorted({tier for holding in held.holdings.values() for tier in holding.tier_bits})
        return SourceCounts(held.num_blocks, held.num_orphan_blocks, held.num_withheld, tuple(tiers))

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_garbage(self) -> int:
        """Blocks that were cleared and whose memory is not back yet."""
        return sum(len(holding.blocks) for holding in self._garbage)

    # ---- events ----

    def apply(self, source: SourceId, event: KvEvent) -> None:
        held = self._sources[source]
        match event:
            case BlockStored():
                if event.kv_cache_spec_kind in WHOLE_PREFIX_KINDS and event.block_hashes:
                    self.collect(2 * len(event.block_hashes))
                    self._store(held, event)
            case BlockRemoved():
                self._remove(held, event)
            case AllBlocksCleared():
                self.clear(source)

    def _store(self, held: Source, event: BlockStored) -> None:
        waiting = [Orphan(event, set())]
        while waiting:
            known = self._place(held, waiting.pop())
            if held.orphans:
                for block_hash in known:
                    waiting += held.adopt(event.group_idx, block_hash)

    def _place(self, held: Source, orphan: Orphan) -> Iterable[BlockHash]:
        """Puts one event into the tree, or keeps it for later, or withholds it. The hashes that are known now."""
        event = orphan.event
        limits, num_blocks = self._limits, len(event.block_hashes)
        keys = block_keys(event)
        holding = self._holding(held, event.group_idx)
        if keys is None or holding is None or not self._fits(held, keys, event.block_size * 4):
            held.num_withheld += num_blocks
            return ()
        parents = self._parents(held, holding, event)
        if not parents:
            held.keep(orphan, limits.orphan_blocks_max)
            return ()
        bits = holding.any_bit | self._tier_bit(held, holding, tier_of(event.medium, event.locality))
        for parent in parents:
            node = parent
            for block_hash, key in zip(event.block_hashes, keys, strict=True):
                node = self._child(node, key, event.block_size * 4)
                if block_hash not in orphan.gone:
                    self._hold(held, holding, block_hash, node, bits)
            self._prune(node)
        return [block_hash for block_hash in event.block_hashes if block_hash not in orphan.gone]

    def _fits(self, held: Source, keys: list[bytes], advance: int) -> bool:
        limits = self._limits
        if self._num_nodes + len(keys) * limits.nodes_per_hash_max > limits.nodes_max:
            return False
        if held.num_blocks + len(keys) > limits.blocks_per_source_max:
            return False
        for width in {len(key) for key in keys if len(key) % 4 == 0}:
            if (advance, width) not in self._shapes:
                if len(self._shapes) >= limits.shapes_max:
                    return False
                self._shapes[advance, width] = None
        return True

    def _parents(self, held: Source, holding: Holding, event: BlockStored) -> list[Node]:
        """Where the first block goes; nowhere while that is not known for sure."""
        lora, salt = namespace_of(event)
        held.tells_salts |= event.cache_salt is not None
        if event.parent_block_hash is None:
            return [self._content(lora, salt).top]
        found = [node for node in holding.nodes(event.parent_block_hash) if node.content.lora == lora]
        if salt or held.tells_salts:
            found = [node for node in found if node.content.salt == salt]
        # Two contents under one name, and the event does not say which: neither is believed.
        return found if all(node.content is found[0].content for node in found) else []

    def _content(self, lora: bytes, salt: bytes) -> Content:
        key = content_key(lora, salt)
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = Content(lora, salt)
        return content

    def _child(self, parent: Node, key: bytes, advance: int) -> Node:
        found = parent.find(key, parent.end + advance)
        if found is None:
            found = Node(parent, key, parent.end + advance)
            parent.link(found)
            self._num_nodes += 1
        return found

    def _hold(self, held: Source, holding: Holding, block_hash: BlockHash, node: Node, bits: int) -> None:
        nodes = holding.blocks.get(block_hash)
        if nodes is None:
            holding.blocks[block_hash] = node
        elif nodes is node or (isinstance(nodes, tuple) and node in nodes):
            node.mask |= bits
            return
        else:
            known = nodes if isinstance(nodes, tuple) else (nodes,)
            if len(known) >= self._limits.nodes_per_hash_max:
                held.num_withheld += 1
                return
            holding.blocks[block_hash] = (*known, node)
        node.mask |= bits
        node.refs += 1
        held.num_blocks += 1

    def _remove(self, held: Source, event: BlockRemoved) -> None:
        tier = None if event.medium is None else tier_of(event.medium, event.locality)
        for group, holding in held.holdings.items():
            if event.group_idx is not None and group is not None and group != event.group_idx:
                continue
            tiers = holding.tiers_mask if tier is None else self._bit_of(holding, tier)
            for block_hash in event.block_hashes:
                held.forget_orphans(group, block_hash, event.medium)
                if block_hash in holding.blocks:
                    self._drop(held, holding, block_hash, tiers)

    def _drop(self, held: Source, holding: Holding, block_hash: BlockHash, tiers: int) -> None:
        kept = []
        for node in holding.nodes(block_hash):
            node.mask &= ~tiers
            if node.mask & holding.tiers_mask:
                kept.append(node)
                continue
            node.mask &= ~holding.any_bit
            node.refs -= 1
            held.num_blocks -= 1
            self._prune(node)
        if kept:
            holding.blocks[block_hash] = kept[0] if len(kept) == 1 else tuple(kept)
        else:
            del holding.blocks[block_hash]

    # ---- bits ----

    def _holding(self, held: Source, group: int | None) -> Holding | None:
        holding = held.holdings.get(group)
        if holding is None and len(held.holdings) < self._limits.groups_max:
            holding = held.holdings[group] = Holding(self._new_bit())
            if held.is_visible:
                self._visible |= holding.any_bit
        return holding

    def _tier_bit(self, held: Source, holding: Holding, tier: str) -> int:
        bit = holding.tier_bits.get(tier)
        if bit is not None:
            return bit
        if len(holding.tier_bits) >= self._limits.tiers_max - 1:
            tier = "OTHER"
        bit = holding.tier_bits.get(tier) or holding.add_tier(tier, self._new_bit())
        if held.is_visible:
            self._visible |= bit
        return bit

    def _bit_of(self, holding: Holding, tier: str) -> int:
        return holding.tier_bits.get(tier) or holding.tier_bits.get("OTHER", 0)

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    # ---- memory ----

    def collect(self, limit: int) -> bool:
        """Gives the memory of at most `limit` cleared blocks back. Whether there is more to do."""
        while self._garbage and limit > 0:
            holding = self._garbage[-1]
            while holding.blocks and limit > 0:
                _, entry = holding.blocks.popitem()
                for node in entry if isinstance(entry, tuple) else (entry,):
                    node.mask &= ~holding.all_bits
                    node.refs -= 1
                    self._prune(node)
                limit -= 1
            if not holding.blocks:
                self._garbage.pop()
                self._free_bits += [holding.any_bit, *holding.tier_bits.values()]
        return bool(self._garbage)

    def _prune(self, node: Node) -> None:
        while not node.refs and node.is_leaf and node.parent is not None:
            parent, content = node.parent, node.content
            parent.unlink(node)
            self._num_nodes -= 1
            node = parent
            if node is content.top and node.is_leaf:
                self._contents.pop(content_key(content.lora, content.salt), None)

    # ---- questions ----

    def match(
        self, tokens: bytes, lora: bytes = b"", salt: bytes = b"", sources: Iterable[SourceId] | None = None
    ) -> list[SourceMatch]:
        """Longest cached prefix per visible source. tokens: packed u32. lora, salt: tags of `advisory_keys`."""
        asked = self._sources if sources is None else {s: self._sources[s] for s in sources if s in self._sources}
        content = self._contents.get(content_key(lora, salt))
        depths = self._depths(content.top, tokens) if content is not None and self._visible else {}
        return [self._match_of(source, held, depths) for source, held in asked.items() if held.is_visible]

    def _depths(self, top: Node, tokens: bytes) -> dict[int, int]:
        """Bit of a holder -> bytes of the prefix that it holds."""
        plain = len(self._shapes) == 1 and all(advance == width for advance, width in self._shapes)
        ended = self._walk_plain(top, tokens) if plain else self._walk_shapes(top, tokens)
        depths: dict[int, int] = {}
        for bits, depth in ended:
            while bits:
                bit = bits & -bits
                if depth > depths.get(bit, 0):
                    depths[bit] = depth
                bits ^= bit
        return depths

    def _walk_plain(self, top: Node, tokens: bytes) -> Iterator[tuple[int, int]]:
        """All blocks have one size, so at most one child fits."""
        (width,) = [width for _, width in self._shapes]
        node, mask, starts = top, self._visible, tokens.startswith
        while True:
            child, end = node.child, node.end
            if child is None or not starts(child.key, end):
                child = node.others.get(tokens[end : end + width]) if node.others else None
                if child is None:
                    break
            kept = mask & child.mask
            if kept != mask:
                yield mask ^ kept, end
                mask = kept
                if not mask:
                    return
            node = child
        yield mask, node.end

    def _walk_shapes(self, top: Node, tokens: bytes) -> Iterator[tuple[int, int]]:
        stack = [(top, self._visible)]
        while stack:
            node, mask = stack.pop()
            yield mask, node.end
            for child in node.fitting(tokens, self._shapes):
                kept = mask & child.mask
                if kept:
                    stack.append((child, kept))

    def _match_of(self, source: SourceId, held: Source, depths: dict[int, int]) -> SourceMatch:
        if not depths or not held.holdings:
            return SourceMatch(source, 0, {})
        if len(held.holdings) == 1:  # the usual case, several times as fast
            (holding,) = held.holdings.values()
            tiers = {tier: depths[bit] // 4 for tier, bit in holding.tier_bits.items() if bit in depths}
            return SourceMatch(source, depths.get(holding.any_bit, 0) // 4, tiers)
        tokens = held.depth({group: depths.get(h.any_bit, 0) for group, h in held.holdings.items()})
        by_tier: dict[str, int] = {}
        for tier in {tier for holding in held.holdings.values() for tier in holding.tier_bits} if tokens else ():
            depth = held.depth({g: depths.get(h.tier_bits.get(tier, 0), 0) for g, h in held.holdings.items()})
            if depth:
                by_tier[tier] = depth // 4
        return SourceMatch(source, tokens // 4, by_tier)

    # ---- the law ----

    def check(self) -> None:
        """Every count is what is there, and no node is kept for nobody. For tests."""
        nodes = [node for content in self._contents.values() for node in content.top.below()]
        assert len(nodes) == self._num_nodes
        holdings = [h for held in self._sources.values() for h in held.holdings.values()] + self._garbage
        refs: dict[int, int] = {}
        for holding in holdings:
            for block_hash in holding.blocks:
                for node in holding.nodes(block_hash):
                    refs[id(node)] = refs.get(id(node), 0) + 1
        for node in nodes:
            assert node.refs == refs.pop(id(node), 0)
            assert node.refs or not node.is_leaf, "a leaf that nobody holds"
        assert not refs, "a block that is not in the tree"
        for held in self._sources.values():
            assert held.num_blocks == sum(len(h.nodes(b)) for h in held.holdings.values() for b in h.blocks)
            assert held.num_orphan_blocks == sum(len(o.event.block_hashes) for o in held.all_orphans())
