"""A plain consumer of the core's events: it keeps what was stored, by handle, and walks it by seals.

`all_below` takes along what was stored below: no prompt gets there any more, even if the same tokens are stored above
it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coppice.ids import DomainId, Namespace
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool.free_ring import unpack_handles
from coppice_cache.edge.events.kv_events_view import MEDIUM
from tests.unit.cache.books import Key, Place

Name = tuple[Place, DomainId, bytes]  # of the blocks that follow the block with this seal; b"" at a root


@dataclass(frozen=True, slots=True)
class Block:
    place: Place
    domain: DomainId
    namespace: Namespace
    parent: bytes
    seal: bytes
    tokens: bytes  # of this block alone


class Follower:
    def __init__(self, core: IndexCore) -> None:
        self._core = core
        self._blocks: dict[tuple[Place, int], Block] = {}

    def apply(self, events: Iterable[IndexEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                place = (event.worker_id, event.tier)
                for index, handle in enumerate(unpack_handles(event.handles)):
                    self._blocks.pop((place, handle), None)  # unknown when no slice has told of it yet
                    if event.all_below:
                        self._remove_below(place, event.domain, event.seals[16 * index : 16 * index + 16])
            else:
                self._clear(event)

    def names(self) -> set[tuple[str, str, int]]:
        """Of everything, as a reader of the field's KV events names it: worker, medium, start of the seal."""
        return {(b.place[0], MEDIUM[b.place[1]], int.from_bytes(b.seal[:8], "little")) for b in self._blocks.values()}

    def findable(self) -> dict[Place, set[Key]]:
        """Of workers that are registered."""
        below: dict[Name, list[Block]] = {}
        for block in self._blocks.values():
            below.setdefault((block.place, block.domain, block.parent), []).append(block)
        found: dict[Place, set[Key]] = {}
        for worker in self._core.state.workers.values():
            for place in [(worker.worker_id, tier) for tier, _ in zip(Tier, worker.stores, strict=False)]:
                keys = found[place] = set()
                stack = [
                    (b, b"") for (p, _, parent), blocks in below.items() for b in blocks if p == place and not parent
                ]
                while stack:
                    block, above = stack.pop()
                    key = (block.domain, block.namespace, above + block.tokens)
                    assert key not in keys, "one prefix is stored twice"
                    keys.add(key)
                    stack += [(b, key[2]) for b in below.get((place, block.domain, block.seal), ())]
        return found

    def _store(self, event: Stored) -> None:
        """What it follows need not be known yet: a snapshot may tell of that later."""
        place, parent = (event.worker_id, event.tier), event.parent_seal
        handles = unpack_handles(event.handles)
        size = len(event.tokens) // len(handles)
        for index, handle in enumerate(handles):
            seal, tokens = event.seals[16 * index : 16 * index + 16], event.tokens[index * size : (index + 1) * size]
            self._blocks[place, handle] = Block(place, event.domain, event.namespace, parent, seal, tokens)
            parent = seal

    def _remove_below(self, place: Place, domain: DomainId, seal: bytes) -> None:
        for name, block in [(n, b) for n, b in self._blocks.items() if b.parent == seal and b.place == place]:
            if block.domain == domain and self._blocks.pop(name, None) is not None:
                self._remove_below(place, domain, block.seal)

    def _clear(self, event: Cleared) -> None:
        def hit(block: Block) -> bool:
            named = event.domain in ("", block.domain) and event.namespace in (b"", block.namespace)
            return block.place[0] == event.worker_id and named

        self._blocks = {name: block for name, block in self._blocks.items() if not hit(block)}
