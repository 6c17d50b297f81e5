"""Of which cache epoch generations are: one by one, and many at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.handles import COUNTER_BITS, UInt64, epoch_in_era, epoch_of, make_generation
from coppice.ids import CacheEpoch, Generation

Bool = npt.NDArray[np.bool_]

_COUNTER_BITS = np.uint64(COUNTER_BITS)


def is_of_epoch(generation: int, epoch: CacheEpoch) -> bool:
    return epoch_of(Generation(generation)) == epoch_in_era(epoch)


def are_of_epoch(generations: UInt64, epoch: CacheEpoch) -> Bool:
    current: Bool = (generations >> _COUNTER_BITS) == epoch_in_era(epoch)
    return current


def below_first(epoch: CacheEpoch) -> int:
    """One less than a block's first generation in this epoch: none that is in use is between the two."""
    return make_generation(epoch, 0)
