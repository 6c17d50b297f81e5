"""What a request did with its time, and what it waited for: stages that follow one another without a gap.

    QUEUED  NO_SLOT   ACQUIRE  PREFILL  DECODE  (PREEMPTED)  QUEUED  ACQUIRE  PREFILL  DECODE
    |-------|---------|--------|--------|-------|------------|-------|--------|--------|------|
    came                                         no length                                    ended

Whoever decides says why at that moment; nothing is guessed from times afterwards.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from coppice.messages.record import Record

FIRST_STAGES = 32  # that a history keeps
LAST_STAGES = 32


class StageKind(Enum):
    """`blocker` and `amount` of a stage say who held what; of a kind without a word here they say nothing."""

    QUEUED = "queued"  # others went first; amount: requests of its own tenant before it when it came
    NO_SLOT = "no_slot"  # every running slot was taken; the tenant that held most, and how many
    POOL_FULL = "pool_full"  # no block was free; the domain that held most of a worker's, and how many
    ASKED_BACK = "asked_back"  # no length: the cache service asked a domain for blocks that it had borrowed; how many
    DOMAIN_MAXIMUM = "domain_maximum"  # its own domain held all that it may
    DOMAIN_UNKNOWN = "domain_unknown"  # the cache service had an older tenants file
    NO_WORKER = "no_worker"  # none took new requests
    NO_CACHE = "no_cache"  # the cache service was away
    ACQUIRE = "acquire"  # the cache service was asked for memory
    PREFIX = "prefix"  # another request computed what both begin with; how many tokens
    FORK = "fork"  # another answer of its call computed the prompt
    PREFILL = "prefill"  # the worker, and tokens to compute
    DECODE = "decode"  # the worker
    SLOW_STEP = "slow_step"  # a step that took many times what its like take; the worker, and microseconds expected
    PREEMPTED = "preempted"  # no length: it gave way; `Preemption`
    RESTARTED = "restarted"  # no length: it lost its place by a fault that was not its own; the error's code
    FRONT_DOOR = "front_door"  # its front door read, checked and tokenised it, or made text of the last tokens
    MOVED = "moved"  # from the loss of its planner until another one had it
    OMITTED = "omitted"  # too many stages to be told; how many


WAITING = frozenset(
    {
        StageKind.QUEUED,
        StageKind.NO_SLOT,
        StageKind.POOL_FULL,
        StageKind.DOMAIN_MAXIMUM,
        StageKind.DOMAIN_UNKNOWN,
        StageKind.NO_WORKER,
        StageKind.NO_CACHE,
        StageKind.ACQUIRE,
        StageKind.PREFIX,
        StageKind.FORK,
        StageKind.MOVED,
    }
)


class Preemption(Enum):
    """Why a running request gave way: `blocker` of a PREEMPTED stage."""

    POOL = "pool"  # another one had no block to go on
    DOMAIN = "domain"  # another one of its own domain had none below the domain's maximum
    GUARANTEE = "guarantee"  # it held borrowed blocks that a guarantee asked back
    SLOT = "slot"  # its tenant held more running slots than its share
    ALONE = "alone"  # for its own sake: its blocks were held twice
    YIELDED = "yielded"  # its worker went to another scheduler


class Stage(Record, frozen=True):
    kind: StageKind
    start_ns: int
    end_ns: int
    blocker: str = ""
    amount: int = 0

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def goes_on_as(self, later: Stage) -> bool:
        """They are of one kind, of one blocker, without a gap; of no event, which may happen twice."""
        is_same = self.kind is later.kind and self.blocker == later.blocker
        return is_same and self.end_ns == later.start_ns and bool(self.length_ns and later.length_ns)


class History:
    """Stages of one request, as many as are worth telling: of too many, those in the middle are one OMITTED."""

    __slots__ = ("_amount", "_blocker", "_first", "_kind", "_last", "_omitted", "_since_ns")

    def __init__(self, kind: StageKind, now_ns: int, blocker: str = "", amount: int = 0) -> None:
        self._kind, self._since_ns, self._blocker, self._amount = kind, now_ns, blocker, amount
        self._first: list[Stage] = []
        self._last: deque[Stage] = deque()
        self._omitted: Stage | None = None

    @property
    def kind(self) -> StageKind:
        """Of the stage that lasts."""
        return self._kind

    @property
    def since_ns(self) -> int:
        return self._since_ns

    def becomes(self, kind: StageKind, now_ns: int, blocker: str = "", amount: int = 0) -> None:
        """A stage of this kind begins, unless it lasts already. Who asked in vain waits on for what it waited for."""
        if kind is self._kind:
            return
        before = self._newest()
        if self._kind is StageKind.ACQUIRE and before is not None and before.kind is kind and before.length_ns:
            self._take_newest()
            self._kind, self._since_ns, self._blocker, self._amount = (
                kind,
                before.start_ns,
                before.blocker,
                before.amount,
            )
            return
        self._end(now_ns)
        self._kind, self._blocker, self._amount = kind, blocker, amount

    def was(self, stage: Stage) -> None:
        """Since the last stage began, this was so: what lasts is split by it."""
        start_ns, end_ns = max(stage.start_ns, self._since_ns), max(stage.end_ns, self._since_ns)
        self._end(start_ns)
        self._add(Stage(stage.kind, start_ns, end_ns, stage.blocker, stage.amount))
        self._since_ns = end_ns

    def happened(self, kind: StageKind, now_ns: int, blocker: str = "", amount: int = 0) -> None:
        """What has no length: the stage that lasts goes on behind it."""
        self.was(Stage(kind, now_ns, now_ns, blocker, amount))

    def told(self, now_ns: int) -> tuple[Stage, ...]:
        """All stages, the last of which ends now. Call it once."""
        self._end(now_ns)
        omitted = () if self._omitted is None else (self._omitted,)
        return (*self._first, *omitted, *self._last)

    def _end(self, now_ns: int) -> None:
        if now_ns > self._since_ns:
            self._add(Stage(self._kind, self._since_ns, now_ns, self._blocker, self._amount))
            self._since_ns = now_ns

    def _add(self, stage: Stage) -> None:
        before = self._newest()
        if before is not None and before.goes_on_as(stage):
            self._take_newest()
            stage = Stage(stage.kind, before.start_ns, stage.end_ns, before.blocker, before.amount)
        if len(self._first) < FIRST_STAGES and not self._last:
            self._first.append(stage)
            return
        self._last.append(stage)
        if len(self._last) > LAST_STAGES:
            oldest, omitted = self._last.popleft(), self._omitted
            start_ns, count = (oldest.start_ns, 0) if omitted is None else (omitted.start_ns, omitted.amount)
            self._omitted = Stage(StageKind.OMITTED, start_ns, oldest.end_ns, "", count + 1)

    def _newest(self) -> Stage | None:
        if self._last:
            return self._last[-1]
        return self._first[-1] if self._first and self._omitted is None else None

    def _take_newest(self) -> None:
        (self._last or self._first).pop()
