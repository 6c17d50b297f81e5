"""The loop's time, shared among tenants: in each of its turns a tenant has so many units of it, whatever waits.

    a turn    [ t1: 3 5 ] [ t2: 1 ]     what a tenant has beyond UNITS waits for the next turn, in the order it came
    the next  [ t1: 12 ]  [ t3: 2 ]     a piece is never cut,
    the next  [ t1: 4 ]                 but what it took too much is missing here

Without it, hundreds of answers that one client asks for at once begin in one turn, and everybody's streams wait for it.
A unit is some 0.1 ms: an answer that begins, or 64 KiB of a body.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from coppice_scheduler.edge.frontend.generation_spec import MAX_PROMPTS, MAX_RUNS, GenerationSpec

UNITS = 8  # of a tenant, in a turn
UNIT_BYTES = 64 * 1024  # of a body


class LoopShare:
    """Used from one event loop."""

    def __init__(self, units: int = UNITS) -> None:
        self._units = units
        self._taken: Counter[str] = Counter()  # in this turn; what was more than a turn's units counts in the next ones
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # none is empty
        self._waking: set[str] = set()  # who waited for this turn and goes on in it; nobody of theirs goes first
        self._is_counting = False

    async def take(self, tenant: str, units: int) -> None:
        """Returns in a turn in which the tenant has units left, in the order of the calls.

        A piece may be larger than what is left: the tenant's next ones wait until its turns have made up for it. One
        of 0 units goes with the one after it.
        """
        if tenant not in self._lines and tenant not in self._waking and self._taken[tenant] < self._units:
            self._taken[tenant] += units
            if not self._is_counting:
                self._is_counting = True
                asyncio.get_running_loop().call_soon(self._next_turn)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append((mine, units))
        await mine

    def _next_turn(self) -> None:
        self._waking.clear()
        # Counter's own subtraction keeps what is above 0.
        self._taken -= Counter(dict.fromkeys(self._taken, self._units))
        for tenant in list(self._lines):
            self._let_go(tenant)
        self._is_counting = bool(self._taken or self._waking)
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._next_turn)  # behind all that were let go

    def _let_go(self, tenant: str) -> None:
        line = self._lines[tenant]
        while line and self._taken[tenant] < self._units:
            piece, units = line.popleft()
            if not piece.done():  # cancelled
                piece.set_result(None)
                self._waking.add(tenant)
                self._taken[tenant] += units
        if not line:
            del self._lines[tenant]


def units_to_open(spec: GenerationSpec) -> int:
    """What opening a call takes of the loop. Nothing is checked yet: what is out of range will be refused."""
    num_prompts = min(len(spec.prompts), MAX_PROMPTS)
    num_answers = min(max(spec.num_candidates, 0) * num_prompts, MAX_RUNS)
    return 2 * num_prompts + num_answers // 4
