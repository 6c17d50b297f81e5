"""What the model of the cache writes down, and what is findable by visiting every node."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import unpack

from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Acquire, Extend, Extended, Grant, Publish, Published
from coppice.messages.registration import CopyOrder, Direction
from coppice_cache.core.base.events import Tier
from coppice_cache.core.index import IndexCore
from coppice_cache.core.radix.tree import Node

Key = tuple[DomainId, Namespace, bytes]
Place = tuple[WorkerId, Tier]  # one pool
LeaseKey = tuple[SchedulerEpoch, LeaseId]
WAYS = {
    Direction.DEMOTE: (Tier.DEVICE, Tier.HOST),
    Direction.PROMOTE: (Tier.HOST, Tier.DEVICE),
    Direction.STORE: (Tier.HOST, Tier.DISK),
    Direction.LOAD: (Tier.DISK, Tier.HOST),
}


def handles(data: bytes) -> list[int]:
    return list(unpack(f"<{len(data) // 8}Q", data))


def block_of(handle: int) -> int:
    return handle & 0xFFFFFF


def common(first: bytes, second: bytes) -> int:
    """Bytes of whole tokens from the start that agree."""
    count = 0
    while count < min(len(first), len(second)) and first[count : count + 4] == second[count : count + 4]:
        count += 4
    return count


@dataclass(eq=False)
class ModelLease:
    op: Acquire
    epoch: SchedulerEpoch
    grant: Grant
    handles: list[int]
    settled: int  # blocks
    tokens: bytes  # as far as they are known
    gone: bool = False  # what it settled was invalidated
    copy_key: Key | None = None  # that the copy source stands for, while it is held
    fence: tuple[WorkerId, int] | None = None
    path: list[int] = field(default_factory=list)  # handles of what it settled, as the tree has them
    mine: set[int] = field(default_factory=set)  # indices of own blocks that it published
    done: list[tuple[Publish, Published]] = field(default_factory=list)
    extended: tuple[Extend, Extended] | None = None

    @property
    def key(self) -> LeaseKey:
        return self.epoch, self.op.lease_id

    @property
    def place(self) -> Place:
        return self.grant.worker_id, Tier.DEVICE

    def tokens_after(self, op: Publish, block_bytes: int) -> bytes:
        """As far as they are known once it has published."""
        start, named_end = (count * block_bytes for count in (op.first_block, op.first_block + op.num_named_blocks))
        return self.tokens[:start] + self.op.tokens[start:named_end] + op.tokens


@dataclass(eq=False)
class Job:
    """A copy between tiers that the worker has not answered. `keys` are those that may still become findable."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    order: CopyOrder
    source: Place
    target: Place
    source_keys: list[Key]
    keys: set[Key]

    @property
    def goes_up(self) -> bool:
        return self.target[1] < self.source[1]


def findable(core: IndexCore) -> dict[Place, set[Key]]:
    """All that walks could find, by visiting every node."""
    found: dict[Place, set[Key]] = {}
    for worker in core.state.workers.values():
        for tier, store in zip(Tier, worker.stores, strict=False):
            keys = found.setdefault((worker.worker_id, tier), set())
            for (domain, namespace), tree in store.trees.items():
                stack: list[tuple[Node, bytes]] = [(tree, b"")] if store.is_current(tree) else []
                while stack:
                    node, above = stack.pop()
                    tokens = above + node.tokens
                    size = store.block_bytes
                    keys.update(
                        (domain, namespace, tokens[:end]) for end in range(len(above) + size, len(tokens) + 1, size)
                    )
                    stack += [(child, tokens) for child in node.children.values()]
    return found
