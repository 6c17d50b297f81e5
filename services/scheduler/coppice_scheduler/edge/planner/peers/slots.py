"""Numbers of front doors from several schedulers, which may be alike: each connection has a slot of its own.

    | slot: 8 bits | counter: 24 bits |   a request's number in the planner
    | door: 8 bits | counter: 24 bits |   the same at its front door

Front doors of this scheduler get their own number for slot, unless another one holds it, so that of theirs nothing is
rewritten.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from msgspec.structs import replace

from coppice_scheduler.core.state.request import TokenBatch
from coppice_scheduler.edge.ipc.door_messages import DOOR_SHIFT, DOORS_MAX, Asks
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE

PEER_DOORS_MAX = 128  # of DOORS_MAX: front doors of this scheduler, 64 at most and those that died, find a slot
_COUNTER_MASK = (1 << DOOR_SHIFT) - 1


class Slots:
    """Those that are free. One that was given back is taken last: late words name requests of its last owner by it."""

    def __init__(self) -> None:
        self._free = deque(reversed(range(DOORS_MAX)))
        self._num_peers = 0

    def take(self, wanted: int) -> int:
        """For a front door of this scheduler."""
        if wanted in self._free:
            self._free.remove(wanted)
            return wanted
        return self._free.popleft()

    def take_for_peer(self) -> int | None:
        """For a front door of another scheduler; None: there are too many."""
        if self._num_peers >= PEER_DOORS_MAX:
            return None
        self._num_peers += 1
        return self._free.popleft()

    def give_back(self, slot: int, *, is_peer: bool) -> None:
        self._free.append(slot)
        self._num_peers -= is_peer


def renumbered(number: int, place: int) -> int:
    """`number` with these upper bits, a slot or a door."""
    return number & _COUNTER_MASK | place << DOOR_SHIFT


def asks_in(asks: Asks, slot: int) -> Asks:
    """As the planner numbers what a front door asks for."""
    requests = tuple(replace(request, number=renumbered(request.number, slot)) for request in asks.requests)
    lookups = tuple(replace(lookup, number=renumbered(lookup.number, slot)) for lookup in asks.lookups)
    return replace(asks, requests=requests, lookups=lookups)


def batch_out(batch: TokenBatch, door: int) -> TokenBatch:
    """As the front door numbers its requests."""
    numbers = np.frombuffer(batch.numbers, dtype=TOKEN_DTYPE)
    mapped = numbers & TOKEN_DTYPE.type(_COUNTER_MASK) | TOKEN_DTYPE.type(door << DOOR_SHIFT)
    return TokenBatch(mapped.astype(TOKEN_DTYPE, copy=False).tobytes(), batch.tokens)
