"""A request's progress, and the sequence that computes it on one worker.

    request   WAITING -> ASKING -> RUNNING -> FINISHED        preempted or retried: RUNNING -> WAITING
                 ^         |
                 |         v Pending                          woken, or waited long enough
                 +----- SLEEPING
    sequence  GRANTED -> ATTACHED -> CLOSING -> REMOVING -> REMOVED
                 |      in a plan   must be     detach in     no step of the worker can
                 |                  detached    a plan        touch its blocks any more
                 +------------------------------------------------^

A sequence's tokens, counted:

    |<-- num_computed -->|<- in flight ->|
    |<---------- num_planned ----------->|<- still to plan ->|
    |<-------- known tokens of the request -------->|<- num_pending: sampled in steps without a result ->|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coppice.ids import TOKEN_BYTES, LeaseId, SequenceId
from coppice_scheduler.core.fairness import FairShares
from coppice_scheduler.core.leases import Lease
from coppice_scheduler.core.request import Mark, Request

PREFILL_MARKS_MAX = 64
NO_LEASE = LeaseId(b"")


class RequestStatus(Enum):
    WAITING = "waiting"
    ASKING = "asking"  # its Acquire has no answer yet
    SLEEPING = "sleeping"  # another lease computes its prefix; it holds nothing and asks again when woken
    RUNNING = "running"
    FINISHED = "finished"


class SequenceState(Enum):
    GRANTED = "granted"
    ATTACHED = "attached"
    CLOSING = "closing"
    REMOVING = "removing"
    REMOVED = "removed"


@dataclass(slots=True, eq=False)
class RequestState:
    """One accepted request until its outcome. It holds every token, so that any worker can start it over."""

    request: Request
    order: tuple[int, int]  # (priority, arrival): who goes first, and last to be preempted
    tokens: bytearray  # prompt and output so far, without a stop token
    num_prompt_tokens: int
    max_output_tokens: int
    tenant_number: int = 0  # in FairShares
    wants: bool = False  # counted there as one that wants
    status: RequestStatus = RequestStatus.WAITING
    ticket: int = 0  # which stay in the queue this is
    queued_ns: int = 0
    asked_ns: int = 0
    first_token_ns: int = 0
    lease: Lease | None = None
    sequence: Sequence | None = None
    num_retries: int = 0
    num_grants: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    emitted_bytes: int = 0  # of `tokens`, that left in an Output (the prompt counts as left)
    domain_blocked: bool = False  # its last refusal was its own domain's maximum
    asked_under: LeaseId = NO_LEASE  # it asked under this id in vain and does so again: the cache may remember it
    flight_until_ns: int = 0  # until then it may wait for another's prefill; 0: it has not waited in this stay
    wake_ns: int = 0  # when a sleeper asks again, woken or not
    marks: list[Mark] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_tokens_max(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + self.max_output_tokens

    @property
    def num_kv_tokens_max(self) -> int:
        """KV positions that it can ever need: the last token's KV is never computed."""
        return self.num_prompt_tokens + self.max_output_tokens - 1

    def start_wanting(self, shares: FairShares) -> None:
        if not self.wants:
            self.wants = True
            shares.enter(self.tenant_number)

    def stop_wanting(self, shares: FairShares) -> None:
        if self.wants:
            self.wants = False
            shares.leave(self.tenant_number)

    def mark(self, name: str, start_ns: int, end_ns: int) -> None:
        if len(self.marks) < PREFILL_MARKS_MAX:
            self.marks.append((name, start_ns, end_ns))


@dataclass(slots=True, eq=False)
class Sequence:
    """One stay of a request on one worker, under one lease."""

    sequence_id: SequenceId
    request: RequestState
    lease: Lease
    num_start_tokens: int  # tokens known when it was granted: up to here it is prefill
    num_computed: int
    num_planned: int
    state: SequenceState = SequenceState.GRANTED
    num_pending: int = 0
    grown: bytearray = field(default_factory=bytearray)  # owned handles that the worker was not told yet
    zero: bytearray = field(default_factory=bytearray)  # handles to zero before their first write
    ahead_refused: bool = False  # asked for blocks ahead of need in vain: ask for no more than the need

    @property
    def num_to_plan(self) -> int:
        return self.request.num_tokens + self.num_pending - self.num_planned

    @property
    def live(self) -> bool:
        return self.state is SequenceState.GRANTED or self.state is SequenceState.ATTACHED

    @property
    def blocked(self) -> bool:
        """Its next token has no block."""
        return self.num_planned >= self.lease.reserved_tokens
