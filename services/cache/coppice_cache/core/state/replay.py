"""What the log of an earlier incarnation says was findable, as trees that are not hung up yet.

    events, in order --> runs that were stored and not removed --> pieces, cut where others continue them
                                                                     |  by parent seal, from the roots on
    Forest: nodes, parents first; one entry per block, side by side <--'

Nothing here is trusted. A run counts as far as the seals in it are those of its own tokens, computed again with a
chain key that is proved to be its tree's. Whether a block still holds them only its worker knows: `regrowth` asks it. A
piece whose parent is missing hangs nowhere and is forgotten, so prefixes are closed (I11) whatever was lost or made up.

All of this happens before the service opens, so that at a worker's opening there is little left but to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES, UInt64
from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.namespaces import covers, salt_of
from coppice.seals import NO_SEAL, SEAL_BYTES, ChainKey, chain_seals, proved_again
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.core.pool.free_ring import Blocks, unpack_handles
from coppice_cache.core.radix.tree import EDGE_BLOCKS_MAX, Node, Tree, add_child

TreeKey = tuple[DomainId, Namespace]
Cuts = dict[bytes, int]  # seal -> number of the first run that counts below it
Ints = npt.NDArray[np.int64]
_NEVER = -1  # a stamp that no incarnation has


@dataclass(slots=True)
class ReplayCounts:
    """Blocks, since the service started; `leases_*` count leases."""

    offered: int = 0  # stood in the log when it was loaded
    replayed: int = 0  # on the device
    replayed_to_host: int = 0
    replayed_to_disk: int = 0
    refused_seal: int = 0  # not what the tokens give, or not what the worker has
    refused_generation: int = 0  # the block was granted again
    refused_parent: int = 0  # what it continues is not there
    refused_domain: int = 0  # unknown or disabled by now, or over its limits
    unclaimed: int = 0  # the worker never came back with that epoch
    leases_pinned: int = 0  # re-attached onto a replayed node
    leases_publishing: int = 0  # re-attached, and may publish again


class Run(NamedTuple):
    """Consecutive blocks of one tree. `parent` is the seal before the first, NO_SEAL at the root."""

    parent: bytes
    tokens: bytes
    handles: bytes
    seals: bytes
    number: int  # place in the log

    @property
    def num_blocks(self) -> int:
        return len(self.handles) // HANDLE_BYTES

    def part(self, start: int, stop: int, block_bytes: int) -> Run:
        return Run(
            self.parent if start == 0 else self.seals[(start - 1) * SEAL_BYTES : start * SEAL_BYTES],
            self.tokens[start * block_bytes : stop * block_bytes],
            self.handles[start * HANDLE_BYTES : stop * HANDLE_BYTES],
            self.seals[start * SEAL_BYTES : stop * SEAL_BYTES],
            self.number,
        )


@dataclass(slots=True)
class _Grown:
    """A node, the seals of its edge in parts, and how late in the log it was written to."""

    node: Node
    tree: int
    parent: int  # index of the node above; -1 below a root
    first_depth: int  # blocks above it
    seals: list[bytes]
    number: int


@dataclass(slots=True)
class Forest:
    """Trees of a tier of a worker epoch. `nodes` lists parents first, those of one tree together, in the trees' order.

    The arrays have one entry per block, in the order of the nodes and along each edge: handles [n], seals [n, 2],
    index of the node [n], depth from the root [n].
    """

    block_bytes: int
    trees: list[Tree]
    nodes: list[Node]
    node_tree: list[int]
    node_parent: list[int]
    node_number: list[int]
    handles: UInt64
    seals: UInt64
    node_of: Ints
    depth: Ints

    @property
    def blocks(self) -> Blocks:
        """Block id per entry."""
        return self.handles.view(np.int64) & (BLOCKS_MAX - 1)

    def distrust(self, domain: DomainId, namespace: Namespace) -> None:
        """Nothing of this tree is found any more, under each salt."""
        for tree in self.trees:
            if tree.domain == domain and covers(namespace, tree.namespace):
                tree.stamp = _NEVER


Forests = dict[tuple[WorkerEpoch, Tier], Forest]  # of one worker


class ReplayBook:
    """Forests that wait for their workers, and what became of the others."""

    def __init__(self) -> None:
        self.counts = ReplayCounts()
        self._forests: dict[WorkerId, Forests] = {}

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        return tuple(self._forests)

    def distrust(self, domain: DomainId, namespace: Namespace) -> None:
        """A part of this tree was invalidated, under each salt: nothing of it is replayed."""
        for forests in self._forests.values():
            for forest in forests.values():
                forest.distrust(domain, namespace)

    def load(self, seal_keys: tuple[bytes, ...], worker_id: WorkerId, events: Iterable[IndexEvent]) -> None:
        forests = grow(seal_keys, events, self.counts)
        if forests:
            self._forests[worker_id] = forests

    def take(self, worker_id: WorkerId, epoch: WorkerEpoch, tier: Tier) -> Forest:
        """For the worker that came back with this epoch; an empty one where the log has nothing of it."""
        return self._forests.get(worker_id, {}).pop((epoch, tier), None) or _side_by_side(0, [], [])

    def take_disk(self, worker_id: WorkerId) -> tuple[WorkerEpoch, Forest] | None:
        """What the log has of the disk of a worker that did not come back, under the latest epoch."""
        epochs = [epoch for epoch, tier in self._forests.get(worker_id, {}) if tier is Tier.DISK]
        return (max(epochs), self.take(worker_id, max(epochs), Tier.DISK)) if epochs else None

    def drop(self, worker_id: WorkerId) -> list[Tree]:
        """The trees of what is left of a worker, to be taken apart."""
        forests = self._forests.pop(worker_id, {}).values()
        self.counts.unclaimed += sum(len(forest.handles) for forest in forests)
        return [tree for forest in forests for tree in forest.trees]


@dataclass(slots=True)
class _Pool:
    """What one tier of a worker epoch had: which run stored each handle last, and what was cut off."""

    runs: list[Stored] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=dict)

    def apply(self, event: IndexEvent) -> None:
        match event:
            case Stored():
                self.live.update(dict.fromkeys(unpack_handles(event.handles), len(self.runs)))
                self.runs.append(event)
            case Removed():
                for handle in unpack_handles(event.handles):
                    self.live.pop(handle, None)
                if event.all_below:
                    self.cuts[event.seals[-SEAL_BYTES:]] = len(self.runs)
            case Cleared():
                self.live = {handle: run for handle, run in self.live.items() if not _covers(event, self.runs[run])}


def grow(seal_keys: tuple[bytes, ...], events: Iterable[IndexEvent], counts: ReplayCounts) -> Forests:
    """The forests of one worker. `events` are all of that worker, in order."""
    pools: dict[tuple[WorkerEpoch, Tier], _Pool] = {}
    for event in events:
        for tier in Tier if isinstance(event, Cleared) else (event.tier,):
            pools.setdefault((event.worker_epoch, tier), _Pool()).apply(event)
    return {name: _grow_pool(seal_keys, pool, counts) for name, pool in pools.items() if pool.live}


def _covers(cleared: Cleared, stored: Stored) -> bool:
    of_domain = not cleared.domain or cleared.domain == stored.domain
    return of_domain and (not cleared.namespace or cleared.namespace == stored.namespace)


def _grow_pool(seal_keys: tuple[bytes, ...], pool: _Pool, counts: ReplayCounts) -> Forest:
    counts.offered += len(pool.live)
    block_bytes = 0
    by_tree: dict[TreeKey, list[Run]] = {}
    chain_keys: dict[TreeKey, ChainKey] = {}
    for number, stored in enumerate(pool.runs):
        bytes_each = len(stored.tokens) // max(1, len(stored.handles) // HANDLE_BYTES)
        block_bytes = block_bytes or bytes_each
        alive = [pool.live.get(handle) == number for handle in unpack_handles(stored.handles)]
        if not any(alive):
            continue
        name = (stored.domain, stored.namespace)
        if name not in chain_keys and (key := _proved(seal_keys, name, stored.chain_key)) is not None:
            chain_keys[name], by_tree[name] = key, []
        run = Run(stored.parent_seal or NO_SEAL, stored.tokens, stored.handles, stored.seals, number)
        fits = name in chain_keys and bytes_each == block_bytes
        good = _num_good(chain_keys[name], run, block_bytes) if fits else 0
        if good < len(alive):
            counts.refused_seal += sum(alive[good:])
            alive = alive[:good]
        if alive:
            by_tree[name] += _segments(run, alive, block_bytes)
    grown: list[_Grown] = []
    trees: list[Tree] = []
    for (domain, namespace), runs in by_tree.items():
        trees.append(Tree(domain, namespace, chain_keys[domain, namespace], block_bytes))
        _hang(trees[-1], len(trees) - 1, runs, pool.cuts, grown)
    forest = _side_by_side(block_bytes, trees, grown)
    counts.refused_parent += sum(run.num_blocks for runs in by_tree.values() for run in runs) - len(forest.handles)
    return forest


def _proved(seal_keys: tuple[bytes, ...], name: TreeKey, key: ChainKey) -> ChainKey | None:
    """The tree's, if we know it for ours. A salt has another digest under another seal key: nobody would ask for it."""
    return proved_again(seal_keys[:1] if salt_of(name[1]) else seal_keys, *name, key)


def _num_good(key: ChainKey, run: Run, block_bytes: int) -> int:
    """How many blocks from the start have the seal that their tokens give."""
    seals = chain_seals(key, run.parent, run.tokens, block_bytes)
    if seals == run.seals:
        return len(seals) // SEAL_BYTES
    same = np.frombuffer(seals, np.uint64) == np.frombuffer(run.seals, np.uint64)[: len(seals) // 8]
    return int(np.argmin(same.reshape(-1, 2).all(axis=1)))


def _segments(run: Run, alive: list[bool], block_bytes: int) -> Iterable[Run]:
    """The parts of the run that were not removed or stored again since."""
    if all(alive):
        return (run if len(alive) == run.num_blocks else run.part(0, len(alive), block_bytes),) if alive else ()
    edges = [index for index, (a, b) in enumerate(pairwise([False, *alive, False])) if a != b]
    return [run.part(start, stop, block_bytes) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _hang(tree: Tree, index: int, runs: list[Run], cuts: Cuts, grown: list[_Grown]) -> None:
    """Join the runs of one tree at their seals, from the root on. Runs that are repeated hang once.

    What was cut off stays away, though the same tokens stand above it again.
    """
    continued = {run.parent for run in runs}
    by_parent: dict[bytes, list[Run]] = {}
    for run in runs:
        for piece in _cut(run, continued, tree.block_bytes):
            by_parent.setdefault(piece.parent, []).append(piece)
    waiting = [(-1, NO_SEAL, 0)]
    for above, seal, first in waiting:  # grows while it is walked
        pieces = [piece for piece in by_parent.pop(seal, []) if piece.number >= first]
        for piece in reversed(pieces):  # the latest word counts
            below = _attach(tree, index, above, piece, grown, alone=len(pieces) == 1)
            if below is not None:
                waiting.append((below, piece.seals[-SEAL_BYTES:], max(first, _first_below(piece, cuts))))


def _first_below(piece: Run, cuts: Cuts) -> int:
    """Number of the first run that counts below the piece."""
    if not cuts:
        return 0
    return max(cuts.get(piece.seals[at : at + SEAL_BYTES], 0) for at in range(0, len(piece.seals), SEAL_BYTES))


def _cut(run: Run, continued: set[bytes], block_bytes: int) -> list[Run]:
    """Pieces that end wherever another run goes on from."""
    count = run.num_blocks
    cuts = [i for i in range(1, count) if run.seals[(i - 1) * SEAL_BYTES : i * SEAL_BYTES] in continued]
    if not cuts:
        return [run]
    return [run.part(start, stop, block_bytes) for start, stop in pairwise([0, *cuts, count])]


def _attach(tree: Tree, index: int, above: int, piece: Run, grown: list[_Grown], *, alone: bool) -> int | None:
    """Index of the node that ends with the piece; None when there is one with the same tokens already."""
    parent = grown[above] if above >= 0 else None
    node = tree if parent is None else parent.node
    if alone and parent is not None and node.num_blocks + piece.num_blocks <= EDGE_BLOCKS_MAX:
        node.append(piece.tokens, piece.handles)
        parent.seals.append(piece.seals)
        parent.number = max(parent.number, piece.number)
        return above
    if piece.tokens[: tree.block_bytes] in node.children:
        return None
    child = add_child(node, piece.tokens, piece.handles, block_bytes=tree.block_bytes, now_ns=0)
    depth = 0 if parent is None else parent.first_depth + node.num_blocks
    grown.append(_Grown(child, index, above, depth, [piece.seals], piece.number))
    return len(grown) - 1


def copied(trees: Iterable[Tree], seals_of: Callable[[bytes], bytes], block_bytes: int) -> Forest:
    """What can be found in trees that are hung up, in trees of its own. `seals_of` gives those of handles."""
    copies: list[Tree] = []
    grown: list[_Grown] = []
    for tree in trees:
        copies.append(Tree(tree.domain, tree.namespace, tree.chain_key, block_bytes, tree.stamp))
        waiting = [(node, -1, 0) for node in tree.children.values()]
        while waiting:
            node, above, depth = waiting.pop()
            parent = copies[-1] if above < 0 else grown[above].node
            child = add_child(parent, node.tokens, node.handles, block_bytes=block_bytes, now_ns=0)
            seals = [seals_of(node.handles)]
            grown.append(_Grown(child, len(copies) - 1, above, depth, seals, node.last_use_ns))
            waiting += [(each, len(grown) - 1, depth + node.num_blocks) for each in node.children.values()]
    return _side_by_side(block_bytes, copies, grown)


def _side_by_side(block_bytes: int, trees: list[Tree], grown: list[_Grown]) -> Forest:
    sizes = np.array([one.node.num_blocks for one in grown], np.int64)
    starts = np.cumsum(sizes) - sizes
    first_depths = np.array([one.first_depth for one in grown], np.int64)
    return Forest(
        block_bytes=block_bytes,
        trees=trees,
        nodes=[one.node for one in grown],
        node_tree=[one.tree for one in grown],
        node_parent=[one.parent for one in grown],
        node_number=[one.number for one in grown],
        handles=np.frombuffer(b"".join([one.node.handles for one in grown]), "<u8"),
        seals=np.frombuffer(b"".join([part for one in grown for part in one.seals]), np.uint64).reshape(-1, 2),
        node_of=np.repeat(np.arange(len(grown)), sizes),
        depth=np.arange(int(sizes.sum())) - np.repeat(starts - first_depths, sizes),
    )
