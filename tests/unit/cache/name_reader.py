"""A reader of the field's KV events, as simple as the field's routers are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


@dataclass
class NameReader:
    """A router: it knows names and topics, and nothing of handles or generations."""

    blocks: defaultdict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))

    def hear(self, topic: str, event: KvEvent) -> None:
        match event:
            case BlockStored(block_hashes=names, medium=medium):
                self.blocks[topic, str(medium)].update(int(name) for name in names)
            case BlockRemoved(block_hashes=names, medium=medium):
                self.blocks[topic, str(medium)].difference_update(int(name) for name in names)
            case AllBlocksCleared():
                for medium in ("GPU", "CPU", "DISK"):
                    self.blocks.pop((topic, medium), None)

    def has(self) -> set[tuple[str, str, int]]:
        return {(topic, medium, name) for (topic, medium), names in self.blocks.items() for name in names}
