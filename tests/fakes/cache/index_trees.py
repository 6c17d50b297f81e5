"""A plain model of what the trees hold: it changes, says how as the core's events, and is read in slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from coppice.handles import HANDLE_BYTES, make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.namespaces import NamespaceFields, encode_namespace
from coppice.seals import NO_SEAL, SEAL_BYTES, chain_key, chain_seals
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.edge.events.following import SnapshotSlice
from coppice_cache.edge.service.event_hub import EventHub

BLOCK_TOKENS = 2
BLOCK_BYTES = 4 * BLOCK_TOKENS
KEY = bytes(range(16))
Chain = tuple[int, ...]  # one letter per block: two blocks with the same letters before them have the same tokens


def namespace_of(model: str) -> Namespace:
    return encode_namespace(NamespaceFields(model, "r", "bf16", BLOCK_TOKENS, "rope"))


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a block is findable. Sorted, a block comes after the one that it continues."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    domain: DomainId
    namespace: Namespace
    tier: Tier
    chain: Chain


@dataclass(frozen=True, slots=True)
class Block:
    """What a follower has to know of a block."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    domain: DomainId
    namespace: Namespace
    tier: Tier
    handle: bytes
    seal: bytes


@dataclass
class FakeTrees:
    """Each change is published to the hub before the next one, as under the service's lock.

    `num_blocks` of each worker's pool are used again soonest, so that handles differ in their generation only.
    """

    hub: EventHub
    slice_blocks: int = 2
    num_blocks: int = 8
    between: Callable[[], None] = lambda: None  # called after each slice: somebody changes the trees
    blocks: dict[Place, bytes] = field(default_factory=dict)  # handle
    unclaimed: list[Removed] = field(default_factory=list)  # cleared, and not reclaimed yet
    epochs: Counter[str] = field(default_factory=Counter)
    _generations: count[int] = field(default_factory=lambda: count(1))

    def epoch_of(self, worker: str) -> WorkerEpoch:
        return WorkerEpoch(self.epochs[worker] + 1)

    def place(self, worker: str, domain: str, model: str, chain: Chain, tier: Tier = Tier.DEVICE) -> Place:
        return Place(WorkerId(worker), self.epoch_of(worker), DomainId(domain), namespace_of(model), tier, tuple(chain))

    # ---- changes ----

    def store(self, last: Place) -> None:
        """Everything on the way to `last` that is not there yet, as one run."""
        missing = [at for at in _way(last) if at not in self.blocks]
        for number, at in enumerate(missing):
            block = self._free_block(at)
            if block is None:
                missing = missing[:number]
                break
            generation = make_generation(CacheEpoch(1), next(self._generations))
            self.blocks[at] = pack_handle(block, generation).to_bytes(HANDLE_BYTES, "little")
        if missing:
            self.hub.publish([self._stored(missing)])

    def remove(self, at: Place) -> None:
        """Evict a leaf; what is no leaf stays."""
        if at in self.blocks and not any(_continues(other, at) for other in self.blocks):
            self.hub.publish([self._removed([at])])
            del self.blocks[at]

    def cut(self, at: Place) -> None:
        """Nobody finds this block or what hangs below it any more; `reclaim` says of each that it is gone."""
        if at in self.blocks:
            self.hub.publish([replace(self._removed([at]), all_below=True)])
            for other in [at, *(other for other in self.blocks if _continues(other, at))]:
                self.unclaimed.append(self._removed([other]))
                del self.blocks[other]

    def clear(self, domain: str = "", model: str = "", worker: str = "w0") -> None:
        """Unfindable at once; `reclaim` says later that the blocks are gone."""
        epoch = self.epoch_of(worker)
        namespace = namespace_of(model) if model else Namespace(b"")
        gone = [
            at
            for at in self.blocks
            if (at.worker_id, at.worker_epoch) == (worker, epoch)
            and (not domain or at.domain == domain)
            and (not namespace or at.namespace == namespace)
        ]
        self.hub.publish([Cleared(WorkerId(worker), epoch, DomainId(domain), namespace)])
        for at in gone:
            self.unclaimed.append(self._removed([at]))
            del self.blocks[at]

    def reclaim(self) -> None:
        if self.unclaimed:
            self.hub.publish([self.unclaimed.pop(0)])

    def end_worker(self, worker: str) -> None:
        """Its epoch dies and another one begins, with the same blocks all free."""
        self.clear(worker=worker)
        self.unclaimed = [removed for removed in self.unclaimed if removed.worker_id != worker]
        self.epochs[worker] += 1

    # ---- what there is ----

    def findable(self) -> set[Block]:
        return {_block(at, handle) for at, handle in self.blocks.items()}

    def next_slice(self, cursor: object | None) -> SnapshotSlice:
        places = sorted(at for at in self.blocks if cursor is None or at > cursor)[: self.slice_blocks]
        part = SnapshotSlice(
            tuple(self._stored([at]) for at in places), places[-1] if len(places) == self.slice_blocks else None
        )
        self.between()
        return part

    def _free_block(self, near: Place) -> BlockId | None:
        pool = (near.worker_id, near.worker_epoch, near.tier)
        used = {
            int.from_bytes(handle, "little") & 0xFFFFFF
            for at, handle in self.blocks.items()
            if (at.worker_id, at.worker_epoch, at.tier) == pool
        }
        used |= {
            int.from_bytes(removed.handles, "little") & 0xFFFFFF
            for removed in self.unclaimed
            if (removed.worker_id, removed.worker_epoch, removed.tier) == pool
        }
        return next((BlockId(block) for block in range(self.num_blocks) if block not in used), None)

    def _stored(self, run: list[Place]) -> Stored:
        first = run[0]
        handles = b"".join(self.blocks[at] for at in run)
        tokens = b"".join(_tokens(at.chain[-1:]) for at in run)
        seals = b"".join(seal_of(at) for at in run)
        before = seal_of(first)[:0] if len(first.chain) == 1 else seal_of(_way(first)[-2])
        return Stored(
            first.worker_id,
            first.worker_epoch,
            first.domain,
            first.namespace,
            before,
            tokens,
            handles,
            seals,
            first.tier,
        )

    def _removed(self, run: list[Place]) -> Removed:
        first = run[0]
        return Removed(
            first.worker_id,
            first.worker_epoch,
            first.domain,
            first.namespace,
            b"".join(self.blocks[at] for at in run),
            b"".join(seal_of(at) for at in run),
            first.tier,
        )


@dataclass
class PlainConsumer:
    """What anybody would write from the description in `coppice_cache.core.base.events`."""

    blocks: set[Block] = field(default_factory=set)
    _parents: dict[Block, bytes] = field(default_factory=dict)  # seal of the block above

    def begin(self) -> None:
        self.blocks = set()
        self._parents = {}

    def apply(self, event: IndexEvent) -> None:
        match event:
            case Stored():
                parent = event.parent_seal
                for block in blocks_of(event):
                    self._parents[block], parent = parent, block.seal
                self.blocks.update(blocks_of(event))
            case Removed():
                self.blocks.difference_update(blocks_of(event))
                for block in blocks_of(event) if event.all_below else []:
                    self._remove_below(block)
            case Cleared(worker_id, worker_epoch, domain, namespace):
                self.blocks = {
                    block
                    for block in self.blocks
                    if (block.worker_id, block.worker_epoch) != (worker_id, worker_epoch)
                    or (domain and block.domain != domain)
                    or (namespace and block.namespace != namespace)
                }

    def _remove_below(self, above: Block) -> None:
        for block in [block for block in self.blocks if self._parents[block] == above.seal]:
            if (block.worker_id, block.worker_epoch, block.tier) == (above.worker_id, above.worker_epoch, above.tier):
                self.blocks.discard(block)
                self._remove_below(block)


def blocks_of(event: Stored | Removed) -> list[Block]:
    handles, seals = event.handles, event.seals
    return [
        Block(
            event.worker_id,
            event.worker_epoch,
            event.domain,
            event.namespace,
            event.tier,
            handles[number * HANDLE_BYTES : (number + 1) * HANDLE_BYTES],
            seals[number * SEAL_BYTES : (number + 1) * SEAL_BYTES],
        )
        for number in range(len(handles) // HANDLE_BYTES)
    ]


def seal_of(at: Place) -> bytes:
    return chain_seals(chain_key(KEY, at.domain, at.namespace), NO_SEAL, _tokens(at.chain), BLOCK_BYTES)[-SEAL_BYTES:]


def _tokens(chain: Chain) -> bytes:
    return b"".join(letter.to_bytes(4, "little") * BLOCK_TOKENS for letter in chain)


def _way(last: Place) -> list[Place]:
    head = (last.worker_id, last.worker_epoch, last.domain, last.namespace, last.tier)
    return [Place(*head, last.chain[:length]) for length in range(1, len(last.chain) + 1)]


def _continues(other: Place, at: Place) -> bool:
    same = _way(other)[len(at.chain) - 1 : len(at.chain)] == [at]
    return same and len(other.chain) > len(at.chain)


def _block(at: Place, handle: bytes) -> Block:
    return Block(at.worker_id, at.worker_epoch, at.domain, at.namespace, at.tier, handle, seal_of(at))
