"""What the advisory tree is made of: nodes, contents (roots), and what each source holds and waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from coppice.messages.kv_events import BlockHash, BlockStored
from coppice_cache.engine_index.core.keys import tier_of

MAX_CROWD = 64  # orphans of one parent, or with one name; more of them are no engine's doing


class Node:
    """One block of content. Most have one child, which is compared in place; more of them are in a dictionary.

    A child whose key is more than tokens is always in the dictionary, so that no prompt is compared with it in place.
    end: bytes of the prefix up to and including this block. mask: who holds it. refs: names that sources have for it.
    """

    __slots__ = ("child", "content", "end", "key", "mask", "others", "parent", "refs")

    def __init__(self, parent: Node | None, key: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        self.end = end
        self.mask = 0
        self.refs = 0
        self.child: Node | None = None
        self.others: dict[bytes | tuple[int, bytes], Node] | None = None
        self.content: Content
        if parent is not None:
            self.content = parent.content

    @property
    def is_leaf(self) -> bool:
        return self.child is None and self.others is None

    def find(self, key: bytes, end: int) -> Node | None:
        child = self.child
        if child is not None and child.key == key and child.end == end:
            return child
        return self.others.get(self._slot(key, end)) if self.others else None

    def link(self, child: Node) -> None:
        if self.child is None and len(child.key) % 4 == 0:
            self.child = child
            return
        if self.others is None:
            self.others = {}
        self.others[self._slot(child.key, child.end)] = child

    def unlink(self, child: Node) -> None:
        others = self.others or {}
        if self.child is child:
            self.child = next((other for other in others.values() if len(other.key) % 4 == 0), None)
            child = self.child or child
        others.pop(self._slot(child.key, child.end), None)
        if not others:
            self.others = None

    def _slot(self, key: bytes, end: int) -> bytes | tuple[int, bytes]:
        """A key with tokens beyond its block looks like that of a longer block; where it ends tells them apart."""
        advance = end - self.end
        return key if len(key) == advance or len(key) % 4 else (advance, key)

    def fitting(self, tokens: bytes, shapes: Iterable[tuple[int, int]]) -> Iterator[Node]:
        """The children that the tokens go on with."""
        child, end = self.child, self.end
        if child is not None and tokens.startswith(child.key, end):
            yield child
        if self.others:
            for advance, width in shapes:
                key = tokens[end : end + width]
                found = self.others.get(key if advance == width else (advance, key))
                if found is not None:
                    yield found

    def below(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            children = ([node.child] if node.child else []) + list((node.others or {}).values())
            yield from children
            stack += children


class Content:
    """One namespace: what its blocks depend on beside their tokens. Empty tags: no adapter, no salt."""

    __slots__ = ("lora", "salt", "top")

    def __init__(self, lora: bytes, salt: bytes) -> None:
        self.lora, self.salt = lora, salt
        self.top = Node(None, b"", 0)
        self.top.content = self


class Holding:
    """What one source holds in one group of layers: by the engine's names, and as bits in the nodes."""

    __slots__ = ("all_bits", "any_bit", "blocks", "tier_bits", "tiers_mask")

    def __init__(self, any_bit: int) -> None:
        self.any_bit = any_bit
        self.tier_bits: dict[str, int] = {}
        self.tiers_mask = 0
        self.all_bits = any_bit
        self.blocks: dict[BlockHash, Node | tuple[Node, ...]] = {}

    def nodes(self, block_hash: BlockHash) -> tuple[Node, ...]:
        entry = self.blocks.get(block_hash)
        if entry is None:
            return ()
        return entry if isinstance(entry, tuple) else (entry,)

    def add_tier(self, tier: str, bit: int) -> int:
        self.tier_bits[tier] = bit
        self.tiers_mask |= bit
        self.all_bits |= bit
        return bit


@dataclass(slots=True)
class Orphan:
    """An event whose parent is not known. gone: those of its blocks that were removed while it waited."""

    event: BlockStored
    gone: set[BlockHash]


@dataclass(slots=True)
class Source:
    """One cache of one engine: a worker, or one data-parallel rank of it."""

    is_visible: bool = True
    tells_salts: bool = False  # an engine that names salts at all does so with every block
    num_blocks: int = 0
    num_withheld: int = 0
    num_orphan_blocks: int = 0
    holdings: dict[int | None, Holding] = field(default_factory=dict)
    orphans: dict[tuple[int | None, BlockHash], list[Orphan]] = field(default_factory=dict)
    waiting: dict[tuple[int | None, BlockHash], list[Orphan]] = field(default_factory=dict)

    def keep(self, orphan: Orphan, blocks_max: int) -> None:
        """Keeps it by its parent's name; over the limit the oldest are withheld."""
        event = orphan.event
        assert event.parent_block_hash is not None
        siblings = self.orphans.setdefault((event.group_idx, event.parent_block_hash), [])
        if any(other.event == event and not other.gone for other in siblings):
            return
        crowd = max(len(siblings), *(len(self.waiting.get((event.group_idx, h), ())) for h in event.block_hashes))
        if crowd >= MAX_CROWD:
            self.num_withheld += len(event.block_hashes)
            return
        siblings.append(orphan)
        self.num_orphan_blocks += len(event.block_hashes)
        for block_hash in event.block_hashes:
            self.waiting.setdefault((event.group_idx, block_hash), []).append(orphan)
        while self.num_orphan_blocks > blocks_max:
            group, parent = next(iter(self.orphans))
            self.num_withheld += sum(len(oldest.event.block_hashes) for oldest in self.adopt(group, parent))

    def adopt(self, group: int | None, parent: BlockHash) -> list[Orphan]:
        """Hands out those that waited for this parent."""
        found = self.orphans.pop((group, parent), [])
        for orphan in found:
            self.num_orphan_blocks -= len(orphan.event.block_hashes)
            for block_hash in orphan.event.block_hashes:
                self._unwait(orphan, block_hash)
        return found

    def _unwait(self, orphan: Orphan, block_hash: BlockHash) -> None:
        key = (orphan.event.group_idx, block_hash)
        left = [other for other in self.waiting.get(key, []) if other is not orphan]
        if left:
            self.waiting[key] = left
        else:
            self.waiting.pop(key, None)

    def forget_orphans(self, group: int | None, block_hash: BlockHash, medium: str | None) -> None:
        """A block was removed that waits for its parent."""
        for orphan in self.waiting.get((group, block_hash), ()):
            stored = tier_of(orphan.event.medium, None)
            if medium is None or tier_of(medium, None) == stored:
                orphan.gone.add(block_hash)

    def depth(self, by_group: dict[int | None, int]) -> int:
        """Bytes of the usable prefix: each group of layers has to hold it; what came without a group is whole."""
        groups = [depth for group, depth in by_group.items() if group is not None]
        return max(by_group.get(None, 0), min(groups, default=0))

    def all_orphans(self) -> list[Orphan]:
        return [orphan for siblings in self.orphans.values() for orphan in siblings]
