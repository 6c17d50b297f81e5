"""The floor: two small caches of sampled blocks, one by age and one by the hazard model, say which of them decides.

    blocks of the domain    | | |x| | | |x| | |x|          x: sampled, by a hash of the seal; few enough for the room
    by age                  one LRU of them                hits that it has and the other has not
    by hazard               the cells' order of eviction   hits that it has and the other has not

Both see every access to a sampled block, whoever decides, and go on knowing blocks that the domain itself has lost. So
what the other order would have given is measured and not guessed, and the domain gives up no more than what it takes to
see that. Only its own accesses have a say.

Sampled keys in a scaled capacity: Waldspurger et al. 2017. Blocks are taken one by one here; that one is of no use
without those before it is left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import sqrt
from typing import Final
from zlib import crc32

import numpy as np

from coppice_cache.core.eviction.hazard import NUM_LEVELS, Ranking, buckets_of

BLOCKS_MAX: Final = 512  # of a small cache
_SHIFT_MIN: Final = 2  # also of few blocks only one in four is sampled: an access must stay cheap
_BATCH: Final = 16  # blocks that leave at once, at least, so that an order is made for several
_SURE: Final = 2.0  # standard deviations by which the hazard model must be ahead to decide again
_IN_DOUBT: Final = 1.0  # by which it must be behind to decide no more
_ROUNDS: Final = 4  # through a small cache, after which what was counted counts half


class Miniatures:
    __slots__ = (
        "_by_age",
        "_by_hazard",
        "_capacity",
        "_lead_before",
        "_num_accesses",
        "_shift",
        "_squares",
        "age_ahead",
        "hazard_ahead",
    )

    def __init__(self) -> None:
        self._by_age: OrderedDict[bytes, None] = OrderedDict()
        self._by_hazard = _ByHazard()
        self._shift = _SHIFT_MIN
        self._capacity = 0
        self._num_accesses = 0
        self.age_ahead = 0.0  # accesses that only LRU would have hit
        self.hazard_ahead = 0.0  # and that only the other would have
        self._lead_before = 0.0  # of the other, before this request
        self._squares = 0.0  # of what requests changed of that

    def fit(self, num_cached: int) -> bool:
        """To a domain of so many blocks. Whether fewer of them are sampled from now on."""
        is_narrower = num_cached >> self._shift > BLOCKS_MAX
        if is_narrower:
            while num_cached >> self._shift > BLOCKS_MAX:
                self._shift += 1
            for key in [key for key in self._by_age if not self.samples(key)]:
                del self._by_age[key]
            self._by_hazard.keep(self.samples)
        self._capacity = num_cached >> self._shift
        return is_narrower

    def samples(self, seal: bytes) -> bool:
        return not crc32(seal) & ((1 << self._shift) - 1)

    def begin(self) -> None:
        """Another request. Its blocks are hit or missed together: what it changes is one observation, not many."""
        lead = self.hazard_ahead - self.age_ahead
        self._squares += (lead - self._lead_before) ** 2
        self._lead_before = lead

    def used(self, seal: bytes, level: int, clock: int) -> None:
        """A sampled block is used, or stored. What stands before others in a prompt comes after them."""
        by_age, by_hazard = seal in self._by_age, self._by_hazard.use(seal, level, clock)
        if by_age != by_hazard:
            if by_age:
                self.age_ahead += 1
            else:
                self.hazard_ahead += 1
        self._by_age[seal] = None
        self._by_age.move_to_end(seal)
        self._num_accesses += 1
        if self._num_accesses >= _ROUNDS * max(self._capacity, _BATCH):
            self._num_accesses = 0
            self.age_ahead /= 2
            self.hazard_ahead /= 2
            self._lead_before /= 2
            self._squares /= 4

    def hinted(self, seal: bytes, level: int) -> None:
        """More is known of a block since it was used."""
        self._by_hazard.hint(seal, level)

    @property
    def is_over(self) -> bool:
        """Whether blocks have to leave."""
        return len(self._by_hazard) > self._capacity + _BATCH

    def make_room(self, ranking: Ranking, low: int, top: int, clock: int) -> None:
        count = len(self._by_hazard) - self._capacity
        self._by_hazard.evict(count, ranking, low, top, clock)
        while len(self._by_age) > self._capacity:
            self._by_age.popitem(last=False)

    def prefers_age(self, *, now: bool) -> bool:
        """Which order is to decide; `now`: whether that by age does."""
        lead, deviation = self.hazard_ahead - self.age_ahead, sqrt(self._squares + 1)
        return lead <= _SURE * deviation if now else lead < -_IN_DOUBT * deviation


class _ByHazard:
    """Blocks with their level and last use, in arrays."""

    __slots__ = ("_free", "_keys", "_levels", "_places", "_used_at")

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._levels = np.zeros(0, np.int64)
        self._used_at = np.zeros(0, np.int64)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def use(self, key: bytes, level: int, clock: int) -> bool:
        """Whether it was there."""
        place = self._places.get(key)
        was_there = place is not None
        if place is None:
            if not self._free:
                self._grow()
            place = self._places[key] = self._free.pop()
            self._keys[place] = key
        self._levels[place] = level
        self._used_at[place] = clock
        return was_there

    def hint(self, key: bytes, level: int) -> None:
        place = self._places.get(key)
        if place is not None:
            self._levels[place] = level

    def _grow(self) -> None:
        count = len(self._keys)
        more = max(count, 2 * _BATCH)
        self._keys += [b""] * more
        self._levels = np.concatenate([self._levels, np.zeros(more, np.int64)])
        self._used_at = np.concatenate([self._used_at, np.zeros(more, np.int64)])
        self._free += range(count, count + more)

    def evict(self, count: int, ranking: Ranking, low: int, top: int, clock: int) -> None:
        """Those of the first cells, and of one cell the oldest."""
        places = np.fromiter(self._places.values(), np.int64, len(self._places))
        used_at = self._used_at[places]
        cells = np.clip(buckets_of(clock - used_at), low, top) * NUM_LEVELS + self._levels[places]
        ranks = np.array(ranking.rank, np.int64)[cells]
        for place in places[np.lexsort((used_at, ranks))[:count]].tolist():
            del self._places[self._keys[place]]
            self._free.append(place)

    def keep(self, is_kept: Callable[[bytes], bool]) -> None:
        for key in [key for key in self._places if not is_kept(key)]:
            self._free.append(self._places.pop(key))
