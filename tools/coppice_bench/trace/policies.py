"""Block by block: the optimum with foresight, and two policies from the literature, as measures for ours.

All of them store each request whole and hit prefixes only. LRU, ARC and S3-FIFO meet the blocks of a prompt from its
end to its start, so that what stands before others goes after them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

Prompts = Sequence[tuple[int, ...]]
_NEVER = 1 << 60


def optimum(prompts: Prompts, capacity: int) -> int:
    """Hits of leaf-first Belady (1966): what is used again last goes first, deeper blocks before those above them.

    A block is never used later than what stands below it, so the order takes leaves first by itself.
    """
    coming = _next_uses(prompts)
    cached: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for prompt, uses in zip(prompts, coming, strict=True):
        hits += _prefix(prompt, cached)
        for depth, (block, use) in enumerate(zip(prompt, uses, strict=True)):
            cached[block] = (-use, -depth)
            heappush(heap, (-use, -depth, block))
        while len(cached) > capacity:
            *key, block = heappop(heap)
            if cached.get(block) == tuple(key):
                del cached[block]
    return hits


def _next_uses(prompts: Prompts) -> list[list[int]]:
    """For each block of each prompt, the number of the next prompt with it."""
    seen: dict[int, int] = {}
    coming = []
    for number in range(len(prompts) - 1, -1, -1):
        coming.append([seen.get(block, _NEVER) for block in prompts[number]])
        for block in prompts[number]:
            seen[block] = number
    coming.reverse()
    return coming


def lru(prompts: Prompts, capacity: int) -> int:
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += _prefix(prompt, cached)
        for block in reversed(prompt[:capacity]):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def arc(prompts: Prompts, capacity: int) -> int:
    """Megiddo, Modha 2003."""
    cache = _Arc(capacity)
    return _replay(prompts, capacity, cache, cache.use)


def s3fifo(prompts: Prompts, capacity: int) -> int:
    """Yang et al. 2023; a tenth of the cache for what is new."""
    cache = _S3Fifo(capacity)
    return _replay(prompts, capacity, cache, cache.use)


def _replay(prompts: Prompts, capacity: int, cached: _Arc | _S3Fifo, use: Callable[[int], None]) -> int:
    hits = 0
    for prompt in prompts:
        hits += _prefix(prompt, cached)
        for block in reversed(prompt[:capacity]):
            use(block)
    return hits


def _prefix(
    prompt: tuple[int, ...], cached: dict[int, tuple[int, int]] | OrderedDict[int, None] | _Arc | _S3Fifo
) -> int:
    count = 0
    for block in prompt:
        if block not in cached:
            break
        count += 1
    return count


class _Arc:
    """Once used, more than once used, and the ghosts of both; `target` blocks are for the first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        self._often_ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def use(self, block: int) -> None:
        if block in self._once:
            del self._once[block]
        elif block in self._often:
            del self._often[block]
        elif block in self._once_ghosts:
            rise = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._target = min(self._capacity, self._target + rise)
            self._make_room(for_often_ghost=False)
            del self._once_ghosts[block]
        elif block in self._often_ghosts:
            fall = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._target = max(0.0, self._target - fall)
            self._make_room(for_often_ghost=True)
            del self._often_ghosts[block]
        else:
            self._miss(block)
            return
        self._often[block] = None

    def _miss(self, block: int) -> None:
        once = len(self._once) + len(self._once_ghosts)
        total = once + len(self._often) + len(self._often_ghosts)
        if once >= self._capacity:
            if len(self._once) < self._capacity:
                self._once_ghosts.popitem(last=False)
                self._make_room(for_often_ghost=False)
            else:
                self._once.popitem(last=False)
        elif total >= self._capacity:
            if total >= 2 * self._capacity:
                self._often_ghosts.popitem(last=False)
            self._make_room(for_often_ghost=False)
        self._once[block] = None

    def _make_room(self, *, for_often_ghost: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity:
            return
        count = len(self._once)
        if count and (count > self._target or (for_often_ghost and count == self._target) or not self._often):
            block, _ = self._once.popitem(last=False)
            self._once_ghosts[block] = None
        else:
            block, _ = self._often.popitem(last=False)
            self._often_ghosts[block] = None


class _S3Fifo:
    """A small queue, a main queue, and the ghosts of the small one; up to three uses are remembered."""

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, capacity // 10)
        self._main_max = max(1, capacity - self._small_max)
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(3, self._uses[block] + 1)
            return
        while len(self._uses) >= self._capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._uses[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_max or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        block = self._small.popleft()
        if self._uses[block] > 1:
            self._uses[block] = 0
            self._main.append(block)
            return
        del self._uses[block]
        self._ghosts[block] = None
        if len(self._ghosts) > self._main_max:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        block = self._main.popleft()
        if self._uses[block]:
            self._uses[block] -= 1
            self._main.append(block)
        else:
            del self._uses[block]
