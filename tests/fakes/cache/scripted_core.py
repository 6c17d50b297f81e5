"""A scheduler core without a worker: every request gets the tokens of its prompt again, one per turn, then its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coppice.ids import WorkerId
from coppice_scheduler.core.state.request import (
    Effects,
    Finish,
    LookedUp,
    Lookup,
    Output,
    OutputError,
    PoolUse,
    Refused,
    RefusedReason,
    Request,
    Resumed,
    SchedulerStats,
    TokenBatch,
)
from coppice_scheduler.core.state.settings import TenantSettings
from tests.fakes.api.engine import pack, unpack

TURN_NS = 1_000_000
HANGS = 7  # as first token of a prompt: no token, until it is cancelled


@dataclass
class ScriptedCore:
    """As much of `SchedulerCore` as the planner asks of one without a cache service."""

    submitted: list[str] = field(default_factory=list)
    cancelled: list[tuple[str, Finish]] = field(default_factory=list)
    running: dict[str, tuple[Request, list[int]]] = field(default_factory=dict)  # and the tokens that are to come
    resumed: dict[str, Resumed] = field(default_factory=dict)  # what another planner served before
    workers: tuple[WorkerId, ...] = ()
    looked_up: list[LookedUp] = field(default_factory=list)
    hints: tuple[tuple[WorkerId, ...], tuple[int, ...]] = ((), ())  # that every lookup finds
    ended: list[Output] = field(default_factory=list)
    draining: bool = False
    refuses: RefusedReason | None = None  # every request
    fails: bool = False
    now_ns: int = 0

    def submit(self, request: Request, now_ns: int) -> Refused | None:
        self.submitted.append(request.request_id)
        if self.refuses is not None:
            return Refused(self.refuses, "no", 5)
        if self.draining or not request.tokens:
            return Refused(RefusedReason.DRAINING if self.draining else RefusedReason.EMPTY, "no", 5)
        tokens = unpack(request.tokens)
        self.running[request.request_id] = (request, [] if tokens[0] == HANGS else tokens[_num_sent(request) :])
        if request.resumed is not None:
            self.resumed[request.request_id] = request.resumed
        return None

    def look_up(self, lookup: Lookup) -> None:
        self.looked_up.append(LookedUp(lookup.number, *self.hints))

    def open_workers(self) -> tuple[tuple[WorkerId, int], ...]:
        return tuple((worker_id, 1000) for worker_id in self.workers)

    def load_tokens(self) -> int:
        return sum(len(request.tokens) // 4 for request, _ in self.running.values())

    def cancel(self, request_id: str, now_ns: int, finish: Finish = Finish.CANCELLED) -> None:
        if self.running.pop(request_id, None) is not None:
            self.ended.append(Output(request_id, b"", finish))
        self.cancelled.append((request_id, finish))  # last: tests on another thread wait for it

    def end(self, request_id: str, error: OutputError, now_ns: int) -> bool:
        if self.running.pop(request_id, None) is None:
            return False
        self.ended.append(Output(request_id, b"", Finish.ERROR, error))
        return True

    def advance(self, now_ns: int) -> Effects:
        if self.fails:
            raise RuntimeError("the script says so")
        self.now_ns = now_ns
        numbers, tokens = [], []
        for request_id, (request, rest) in list(self.running.items()):
            if rest:
                numbers.append(request.number)
                tokens.append(rest.pop(0))
            elif unpack(request.tokens)[0] != HANGS:
                del self.running[request_id]
                self.ended.append(Output(request_id, b"", Finish.LENGTH, num_output_tokens=len(request.tokens) // 4))
        outputs, self.ended = tuple(self.ended), []
        looked_up, self.looked_up = tuple(self.looked_up), []
        batch = TokenBatch(np.array(numbers, dtype="<u4").tobytes(), pack(tokens))
        return Effects(tokens=(batch,) if numbers else (), outputs=outputs, looked_up=looked_up)

    def next_wakeup_ns(self) -> int | None:
        return self.now_ns + TURN_NS if self.running else None

    def set_tenants(self, settings: TenantSettings, now_ns: int) -> None:
        """All tenants are alike here."""

    def drain(self) -> None:
        self.draining = True

    def pool_use(self) -> PoolUse:
        return PoolUse()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.running), 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _num_sent(request: Request) -> int:
    return 0 if request.resumed is None else len(request.resumed.sent) // 4
