"""Which scheduler epochs and leases will never run here again.

    0 ........ up_to ........ >
    x x o x x | . x . .           x fenced   o spared   . not fenced

A fence is for ever, so this must stay small for ever: everything up to `up_to` is one number and the few epochs that
were spared below it; above it stand the epochs that were fenced by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from coppice.ids import LeaseId


class FencedEpochs:
    """A set of epochs that only grows."""

    def __init__(self) -> None:
        self._up_to = 0
        self._spared: set[int] = set()
        self._named: set[int] = set()

    def __contains__(self, epoch: int) -> bool:
        if epoch <= self._up_to:
            return epoch not in self._spared
        return epoch in self._named

    def __len__(self) -> int:
        """How many epochs are remembered one by one."""
        return len(self._spared) + len(self._named)

    def add(self, named: Iterable[int], up_to: int, spared: Iterable[int]) -> None:
        """Fence `named` and every epoch <= `up_to` that is not in `spared`. Nothing is ever unfenced."""
        spare = frozenset(spared)
        new_up_to = max(self._up_to, up_to)
        self._named.update(named)
        candidates = (self._spared | spare) - self._named
        kept = {
            epoch
            for epoch in candidates
            if epoch <= new_up_to and epoch not in self and (epoch > up_to or epoch in spare)
        }
        self._up_to = new_up_to
        self._spared = kept
        self._named = {epoch for epoch in self._named if epoch > new_up_to}

    def forget_below(self, epoch: int) -> None:
        """Everything below `epoch` is refused for another reason already: one number says the same."""
        self.add((), epoch - 1, ())


class FencedLeases:
    """The `most` leases that were fenced last."""

    def __init__(self, most: int) -> None:
        self._leases: OrderedDict[LeaseId, None] = OrderedDict()
        self._most = most

    def __contains__(self, lease: object) -> bool:
        return lease in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, leases: Iterable[LeaseId]) -> None:
        for lease in leases:
            self._leases[lease] = None
            self._leases.move_to_end(lease)
        while len(self._leases) > self._most:
            self._leases.popitem(last=False)

    def clear(self) -> None:
        self._leases.clear()
