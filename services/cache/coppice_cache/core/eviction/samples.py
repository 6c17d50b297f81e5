"""Runs of blocks that the hazard model learns from: from one access until the next, whether evicted meanwhile or not.

    begin --- survives bucket after bucket, one lesson each --- used again: the last lesson
                       `-- its run is evicted: a ghost from then on, found by the seal of its first block

At most `SAMPLES_MAX` at once. Where runs are so many that samples had to go before their age tells anything, only every
second, fourth ... access becomes one.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from coppice_cache.core.eviction.hazard import Features, HazardModel, bucket_of, end_of
from coppice_cache.core.radix.tree import Node

SAMPLES_MAX = 16_384
_LESSONS_AT_ONCE = 32
_LESSONS_PER_ROUND = 64  # through the cache: some delay, and one look for many
_BLOCKS_PER_SAMPLE = 6  # used, on the average, from one sample to the next
_SAVED_MAX = 1_024  # blocks
_OVER = -1
_UNSEEN: Features = (0, 0, 0)


class Sample:
    """One access to a run of blocks."""

    __slots__ = ("bucket", "num_blocks", "seen", "started", "uses")

    def __init__(self, seen: Features, started: int, bucket: int, num_blocks: int, uses: int) -> None:
        self.seen = seen
        self.started = started  # clock of its access
        self.bucket = bucket
        self.num_blocks = num_blocks
        self.uses = uses


class Samples:
    """The samples of one domain, live runs by node and ghosts by seal."""

    __slots__ = ("_ageing", "_by_key", "_learn_at", "_model", "_paid_until", "num_ghosts")

    def __init__(self, model: HazardModel) -> None:
        self._model = model
        self._by_key: OrderedDict[Node | bytes, Sample] = OrderedDict()
        self._ageing: dict[int, deque[tuple[Sample, int]]] = {}  # by bucket, oldest first
        self._learn_at = 0
        self._paid_until = 0  # on the clock
        self.num_ghosts = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def begin(self, node: Node, seen: Features, clock: int) -> None:
        if clock - self._paid_until < 0:
            return
        self._paid_until = max(self._paid_until, clock - _SAVED_MAX) + _BLOCKS_PER_SAMPLE
        sample = Sample(seen, clock, self._model.low, node.num_blocks, node.uses)
        self._by_key[node] = sample
        self._wait(sample)
        self._bound()

    def used(self, node: Node, clock: int) -> None:
        """The run was used again; what follows is another sample."""
        sample = self._by_key.pop(node, None)
        if sample is not None:
            self._finish(sample, clock)

    def grow(self, node: Node, num_blocks: int) -> None:
        sample = self._by_key.get(node)
        if sample is not None:
            sample.num_blocks += num_blocks

    def split(self, upper: Node, lower: Node) -> None:
        """Both halves have the same past and separate futures."""
        sample = self._by_key.get(lower)
        if sample is not None:
            sample.num_blocks = lower.num_blocks
            other = Sample(sample.seen, sample.started, sample.bucket, upper.num_blocks, sample.uses)
            self._by_key[upper] = other
            self._wait(other)

    def bury(self, node: Node, seal: bytes, *, is_whole: bool) -> None:
        """The run or its end is evicted. A ghost stays; of what was no sample it knows the number of uses only."""
        sample = self._by_key.pop(node, None) if is_whole else None
        self._forget(seal)
        self._by_key[seal] = sample if sample is not None else Sample(_UNSEEN, _OVER, 0, 0, node.uses)
        self.num_ghosts += 1
        self._bound()

    def hint(self, node: Node, seen: Features) -> None:
        """The client said more since."""
        sample = self._by_key.get(node)
        if sample is not None:
            sample.seen = seen

    def seen(self, node: Node) -> Features | None:
        """At its last access, if that became a sample."""
        sample = self._by_key.get(node)
        return None if sample is None else sample.seen

    def forget(self, node: Node) -> None:
        """The run leaves in another way than by eviction: nothing can be learned from it."""
        self._forget(node)

    def revive(self, seal: bytes, clock: int) -> int:
        """A block is stored that may begin a ghost: how often that was used, 0 when it is none."""
        sample = self._by_key.pop(seal, None)
        if sample is None:
            return 0
        self.num_ghosts -= 1
        if sample.started != _OVER:
            self._finish(sample, clock)
        return sample.uses

    def grow_old(self, clock: int, num_cached: int) -> None:
        """Lessons of survival that are due; at most a few at once, so that no access waits long."""
        if clock < self._learn_at:
            return
        low, left = self._model.low, _LESSONS_AT_ONCE
        for bucket, ageing in list(self._ageing.items()):
            due = clock - end_of(bucket)
            while left and ageing and ageing[0][1] <= due:
                left -= 1
                sample, started = ageing.popleft()
                if sample.started != started or sample.bucket != bucket:
                    continue
                if bucket >= low:
                    self._model.learn(sample.seen, bucket, sample.num_blocks, was_used=False)
                sample.bucket = max(bucket + 1, low)
                self._wait(sample)
        if left:
            self._learn_at = clock + num_cached // _LESSONS_PER_ROUND

    def _wait(self, sample: Sample) -> None:
        if sample.bucket >= self._model.top:
            return
        ageing = self._ageing.get(sample.bucket)
        if ageing is None:
            ageing = self._ageing[sample.bucket] = deque()
        ageing.append((sample, sample.started))

    def _finish(self, sample: Sample, clock: int) -> None:
        low, top = self._model.low, self._model.top
        now_in = min(max(bucket_of(clock - sample.started), low), top)
        for bucket in range(max(sample.bucket, low), now_in):
            self._model.learn(sample.seen, bucket, sample.num_blocks, was_used=False)
        self._model.learn(sample.seen, now_in, sample.num_blocks, was_used=True)
        sample.started = _OVER

    def _forget(self, key: Node | bytes) -> None:
        sample = self._by_key.pop(key, None)
        if sample is not None:
            sample.started = _OVER
            self.num_ghosts -= isinstance(key, bytes)

    def _bound(self) -> None:
        if len(self._by_key) > SAMPLES_MAX:
            key, sample = self._by_key.popitem(last=False)
            self.num_ghosts -= isinstance(key, bytes)
            sample.started = _OVER
