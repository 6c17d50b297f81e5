"""The default eviction policy: the leaf with the lowest gain goes first, as the hazard model of its domain sees it; or
the oldest one, while that would have been better for the domain (`floor`).

    cells    bucket of age x level of score, each a ring of leaves from the one used longest ago to the one used last
    ranks    order of the cells by gain; bit r of `_mask` is set when the cell of rank r may have leaves

A leaf stands in the cell of its age and of its score at the last access. Leaves of one cell cross to the next in order
of use, so a heap with one entry per cell knows what is due; a few cross at every access. A victim is the oldest leaf of
the first cell, found by one operation on `_mask`, whatever the number of leaves. What a client retains stands in cells
of its own after all others. By age, cells of one bucket are looked at together, and the oldest leaf of them goes.

Time is the number of blocks that the domain used so far. No other domain and no clock has a say, so the victims of a
domain are a function of its own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Final

from coppice.messages.reuse import Outcome, Reuse
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction.floor import Floor
from coppice_cache.core.eviction.hazard import (
    BEGUN,
    COMMON_USES,
    CONTINUED,
    NUM_CELLS,
    NUM_LEVELS,
    USED,
    Features,
    HazardModel,
    Ranking,
    age_ranking,
    bucket_of,
    end_of,
    features,
    untaught_ranking,
)
from coppice_cache.core.eviction.policy import EvictionPolicy, LruPolicy, ReuseHint
from coppice_cache.core.eviction.samples import Samples
from coppice_cache.core.radix.tree import Link, Node

_BLOCKS_PER_RANKING: Final = 512
_ACCESSES_PER_RANKING: Final = 16  # with small blocks a single prompt has that many; a ranking takes half a millisecond
_CROSSINGS_AT_ONCE: Final = 32
_CROSSINGS_PER_ROUND: Final = 64  # through the cache: some delay, and several leaves cross together
_CELL_BITS: Final = 11  # a due entry is (clock << 11) | cell
_CELL_MASK: Final = (1 << _CELL_BITS) - 1
_USES_MAX: Final = 255
_TICKS: Final = 64  # of the clock that leaves remember, per round through the cache: neighbours share one integer
_HINTS: Final = {Reuse.UNKNOWN: 0, Reuse.LIKELY: 1, Reuse.UNLIKELY: 2}
_OUTCOMES: Final = {Outcome.UNKNOWN: 0, Outcome.CALLED_TOOLS: 1, Outcome.CALLED_NONE: 2}


class AdaptivePolicy(EvictionPolicy):
    """Evictable leaves of one domain on one worker."""

    __slots__ = (
        "_accesses",
        "_by_age",
        "_cells",
        "_clock",
        "_cross_at",
        "_due",
        "_floor",
        "_is_due",
        "_is_ranked",
        "_mask",
        "_model",
        "_num_cached",
        "_ranked_at",
        "_ranking",
        "_samples",
        "_taught",
        "_tick",
    )

    def __init__(self) -> None:
        super().__init__()
        self._model = HazardModel()
        self._samples = Samples(self._model)
        self._clock = 0
        self._tick = 0
        self._num_cached = 0
        self._cross_at = 0
        self._cells: dict[int, Link] = {}
        self._floor = Floor()
        self._by_age = False  # the oldest goes first
        self._ranking = untaught_ranking()
        self._taught: Ranking | None = self._ranking  # as the model has it now; None: to be asked
        self._ranked_at = 0
        self._accesses = 0  # since the last ranking
        self._is_ranked = True
        self._mask = 0
        self._due: list[int] = []  # a heap
        self._is_due: set[int] = set()

    # what happens to runs of blocks

    def touched(self, nodes: list[Node], new_blocks: int, hint: ReuseHint, num_cached: int, now_ns: int) -> None:
        self.expire(now_ns)
        self._num_cached = num_cached
        self._floor.fit(num_cached)
        self._floor.caches.begin()
        self._samples.grow_old(self._clock, num_cached)
        self._cross()
        used_at, num_blocks, num_shared = self._used_at(), 0, _num_shared(nodes)
        of_shared = ReuseHint(call_kind=hint.call_kind)
        for depth, node in enumerate(nodes):
            node.unlink()
            self._samples.used(node, self._clock)
            node.uses = min(node.uses + 1, _USES_MAX)
            node.used_at = used_at
            self._begin(node, new_blocks, of_shared if depth < num_shared else hint, USED)
            num_blocks += node.num_blocks
        self._clock += num_blocks
        self._floor.used(nodes, self._clock)
        self._accesses += 1
        if self._accesses >= _ACCESSES_PER_RANKING and self._clock - self._ranked_at >= _BLOCKS_PER_RANKING:
            self._take_over()

    def created(self, node: Node, seals: bytes, new_blocks: int, hint: ReuseHint) -> None:
        node.uses = self._revive(seals)
        node.used_at = self._used_at()
        self._begin(node, new_blocks, hint, _access_of_new(node))
        self._clock += node.num_blocks
        self._stored(node, seals)

    def grown(self, node: Node, seals: bytes) -> None:
        node.uses = max(node.uses, self._revive(seals))
        count = len(seals) // SEAL_BYTES
        self._samples.grow(node, count)
        self._clock += count
        self._stored(node, seals)

    def split(self, upper: Node, lower: Node) -> None:
        self._samples.split(upper, lower)
        self._floor.split(upper, lower)

    def hinted(self, node: Node, hint: ReuseHint) -> None:
        self._hint(node, hint)
        parent = node.parent
        while parent is not None and parent.parent is not None and len(parent.children) == 1:
            self._hint(parent, hint)
            parent = parent.parent

    def _hint(self, node: Node, hint: ReuseHint) -> None:
        known, said = self._samples.seen(node), _features(node, 0, hint, USED)
        seen = said if known is None else (known[0], known[1], said[2])
        self._samples.hint(node, seen)
        node.level = self._model.level(seen)
        self._floor.hinted(node)
        self._relink(node)

    def evicted(self, node: Node, seal: bytes, *, is_whole: bool) -> None:
        self._samples.bury(node, seal, is_whole=is_whole)
        if is_whole:
            self._floor.forget(node)

    def left(self, node: Node) -> None:
        self._samples.forget(node)
        self._floor.forget(node)

    # who is next

    def offer(self, node: Node) -> None:
        if node.colder is None and node.is_evictable:
            self._link(node)

    def holds(self, node: Node) -> bool:
        return node.colder is not None and node.colder.warmer is node

    def coldest(self) -> Node:
        self._rank()
        while True:
            assert self._mask, "no evictable leaf, although the ledger counted one"
            oldest: Node | None = None
            for rank in self._first_ranks(self._mask):
                node = self._coldest_at(rank)
                if node is not None and (oldest is None or node.used_at < oldest.used_at):
                    oldest = node
            if oldest is not None:
                return oldest

    def next_victims(self, num_blocks: int) -> list[Node]:
        self._rank()
        found: list[Node] = []
        mask = self._mask
        while mask and num_blocks > 0:
            ranks = self._first_ranks(mask)
            for node in _oldest_first([self._evictable_at(rank, num_blocks) for rank in ranks]):
                if num_blocks <= 0:
                    break
                found.append(node)
                num_blocks -= node.num_blocks
            for rank in ranks:
                mask ^= 1 << rank
        return found

    # inside

    def _first_ranks(self, mask: int) -> list[int]:
        """Of the cells whose leaves are compared with each other: the first one, or by age those of its bucket."""
        first = (mask & -mask).bit_length() - 1
        if not self._by_age or first >= NUM_CELLS:
            return [first]
        start = first // NUM_LEVELS * NUM_LEVELS
        bits = mask >> start & (1 << NUM_LEVELS) - 1
        return [start + place for place in range(NUM_LEVELS) if bits >> place & 1]

    def _coldest_at(self, rank: int) -> Node | None:
        """None where the cell has no leaf any more, which then is known."""
        ring = self._cells[self._cell_at(rank)]
        node = ring.warmer
        while isinstance(node, Node):
            if node.is_evictable:
                return node
            node.unlink()
            node = ring.warmer
        self._mask ^= 1 << rank
        return None

    def _evictable_at(self, rank: int, num_blocks: int) -> list[Node]:
        """With so many blocks, if there are as many."""
        found: list[Node] = []
        node = self._cells[self._cell_at(rank)].warmer
        while isinstance(node, Node) and num_blocks > 0:
            if node.is_evictable:
                found.append(node)
                num_blocks -= node.num_blocks
            node = node.warmer
        return found

    def _stored(self, node: Node, seals: bytes) -> None:
        self._floor.stored(node, seals, self._clock)
        caches = self._floor.caches
        if caches.is_over:
            caches.make_room(self._taught_ranking(), self._model.low, self._model.top, self._clock)

    def _begin(self, node: Node, new_blocks: int, hint: ReuseHint, access: int) -> None:
        seen = _features(node, new_blocks, hint, access)
        node.level = self._model.level(seen)
        self._samples.begin(node, seen, self._clock)

    def _revive(self, seals: bytes) -> int:
        """Number of accesses of a run that is stored now: one more than its first ghost had."""
        uses = 1
        if self._samples.num_ghosts:
            for start in range(0, len(seals), SEAL_BYTES):
                before = self._samples.revive(seals[start : start + SEAL_BYTES], self._clock)
                if before and uses == 1:
                    uses = min(before + 1, _USES_MAX)
        return uses

    def _used_at(self) -> int:
        if self._clock - self._tick >= max(1, self._num_cached // _TICKS // 16):
            self._tick = self._clock
        return self._tick

    def _cell_at(self, rank: int) -> int:
        return self._ranking.cell[rank] if rank < NUM_CELLS else rank

    def _link(self, node: Node) -> None:
        if node.retained is not None:
            cell = NUM_CELLS + node.retained.priority
            self._mask |= 1 << cell
            _insert(self._ring(cell), node)
            return
        bucket = bucket_of(self._clock - node.used_at)
        bucket = min(max(bucket, self._model.low), self._model.top)
        cell = bucket * NUM_LEVELS + node.level
        self._mask |= 1 << self._ranking.rank[cell]
        _insert(self._ring(cell), node)
        self._watch(cell)

    def _relink(self, node: Node) -> None:
        if node.colder is not None:
            node.unlink()
            self._link(node)

    def _cross(self) -> None:
        """Leaves that are too old for their cell go to the next one."""
        if self._clock < self._cross_at:
            return
        left = _CROSSINGS_AT_ONCE
        while left and self._due and self._due[0] >> _CELL_BITS <= self._clock:
            cell = heappop(self._due) & _CELL_MASK
            ring, end = self._cells[cell], self._clock - end_of(cell // NUM_LEVELS)
            node, older = ring.warmer, self._ring(cell + NUM_LEVELS)
            while left and isinstance(node, Node) and node.used_at <= end:
                left -= 1
                node.unlink()
                _insert(older, node)
                node = ring.warmer
            self._is_due.discard(cell)
            self._watch(cell)
            self._watch(cell + NUM_LEVELS)
            self._mask |= 1 << self._ranking.rank[cell + NUM_LEVELS]
        if left:
            self._cross_at = self._clock + self._num_cached // _CROSSINGS_PER_ROUND

    def _watch(self, cell: int) -> None:
        """Know when the first leaf of the cell crosses."""
        node, bucket = self._cells[cell].warmer, cell // NUM_LEVELS
        if isinstance(node, Node) and bucket < self._model.top and cell not in self._is_due:
            self._is_due.add(cell)
            heappush(self._due, (node.used_at + end_of(bucket)) << _CELL_BITS | cell)

    def _ring(self, cell: int) -> Link:
        ring = self._cells.get(cell)
        if ring is None:
            ring = self._cells[cell] = Link()
            ring.colder = ring.warmer = ring
        return ring

    def _take_over(self) -> None:
        """What was learned since counts from now on: other gains, another order of the cells."""
        self._model.fit_window(self._num_cached)
        self._model.take_over()
        self._taught = None
        self._by_age = self._floor.caches.prefers_age(now=self._by_age)
        self._ranked_at = self._clock
        self._accesses = 0
        self._is_ranked = False

    def _taught_ranking(self) -> Ranking:
        if self._taught is None:
            self._taught = self._model.ranking()
        return self._taught

    def _rank(self) -> None:
        """Put the cells into that order, once it is asked for: while nothing is evicted nobody needs it."""
        if self._is_ranked:
            return
        self._is_ranked = True
        self._ranking = age_ranking() if self._by_age else self._taught_ranking()
        self._mask = 0
        for cell, ring in list(self._cells.items()):
            if ring.warmer is ring and cell not in self._is_due:
                ring.colder = ring.warmer = None
                del self._cells[cell]
            elif ring.warmer is not ring:
                self._mask |= 1 << (self._ranking.rank[cell] if cell < NUM_CELLS else cell)


def _features(node: Node, new_blocks: int, hint: ReuseHint, access: int) -> Features:
    hinted, outcome = _HINTS[hint.reuse], _OUTCOMES[hint.outcome]
    return features(node.uses, new_blocks, access=access, hint=hinted, call_kind=hint.call_kind, outcome=outcome)


def _oldest_first(rings: list[list[Node]]) -> list[Node]:
    """Each in its own order, whose first one is compared with those of the others."""
    heads = [(nodes[0].used_at, place, 0) for place, nodes in enumerate(rings) if nodes]
    heapify(heads)
    found = []
    while heads:
        _, place, index = heappop(heads)
        nodes = rings[place]
        found.append(nodes[index])
        if index + 1 < len(nodes):
            heappush(heads, (nodes[index + 1].used_at, place, index + 1))
    return found


def _num_shared(nodes: list[Node]) -> int:
    """Of the path that a prompt uses, the nodes from the root down that others begin with, too."""
    for depth in range(len(nodes), 0, -1):
        is_last = depth == len(nodes)  # what the prompt brings becomes one more child of it
        if len(nodes[depth - 1].children) > (not is_last):
            return depth
    return 0


def _access_of_new(node: Node) -> int:
    parent = node.parent
    return BEGUN if parent is None or parent.parent is None or parent.uses > COMMON_USES else CONTINUED


def _insert(ring: Link, node: Node) -> None:
    """As the last used, unless it was used before all others: an inner node that just became a leaf."""
    first, last = ring.warmer, ring.colder
    assert first is not None
    assert last is not None
    is_oldest = isinstance(first, Node) and node.used_at < first.used_at
    before, after = (ring, first) if is_oldest else (last, ring)
    node.colder, node.warmer = before, after
    before.warmer = after.colder = node


POLICIES: Mapping[Eviction, Callable[[], EvictionPolicy]] = MappingProxyType(
    {Eviction.ADAPTIVE: AdaptivePolicy, Eviction.LRU: LruPolicy}
)
