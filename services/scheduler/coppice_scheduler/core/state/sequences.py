"""A request's progress, and the sequence that computes it on one worker.

    request   WAITING -> ASKING -> RUNNING -> FINISHED        preempted or retried: RUNNING -> WAITING
                                                              a fork: FOLLOWING -> WAITING
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

These counts stand in its worker's slot table; the newest of the tokens may stand there, too (`slot_table.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from coppice.ids import TOKEN_BYTES, LeaseId, SequenceId
from coppice.messages.index import NoCapacityReason
from coppice.messages.reuse import Outcome
from coppice.messages.step import TokenLogprobs
from coppice.request_log.stages import History, StageKind
from coppice_scheduler.core.state.fairness import FairShares
from coppice_scheduler.core.state.leases import Lease
from coppice_scheduler.core.state.request import Chunk, Request
from coppice_scheduler.core.state.slot_table import SlotTable

CHUNKS_MAX = 64  # that are told
OUTPUT_BLOCKS_TOGETHER = 4  # blocks behind the prompt are published as many at a time,
OUTPUT_TOKENS_TOGETHER = 64  # but for what fills more tokens than these; the rest when the sequence ends
NO_LEASE = LeaseId(b"")


class RequestStatus(Enum):
    WAITING = "waiting"
    ASKING = "asking"  # its Acquire has no answer yet
    FOLLOWING = "following"  # a fork: it waits until its leader has computed the prompt
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
    """One accepted request until its outcome. It holds every token, so that any worker can start it over.

    The prompt is held once, as `request.tokens`: what says all tokens says that object while there is no output.
    """

    request: Request
    order: tuple[int, int]  # (priority, arrival): who goes first, and last to be preempted
    num_prompt_tokens: int
    max_output_tokens: int
    output: bytearray = field(default_factory=bytearray)  # so far, packed u32, but for the tail in its sequence's slot
    tenant_number: int = 0  # in FairShares
    wants: bool = False  # counted there as one that wants
    status: RequestStatus = RequestStatus.WAITING
    ticket: int = 0  # which stay in the queue this is
    stamp: int = 0  # which place in its line counts
    since_ns: int = 0  # when it came; a preemption does not change that
    num_matched: int = 0  # of its tokens, found in the cache when somebody last looked
    matched_ns: int | None = None  # when that was
    num_yields: int = 0  # times that it gave its place to a tenant below its share
    queued_ns: int = 0
    first_token_ns: int = 0
    lease: Lease | None = None
    sequence: Sequence | None = None
    num_retries: int = 0
    restarted_at: int = 0  # its length when it started over last because it was alone and got no block
    num_grants: int = 0
    num_cached_tokens: int = 0
    num_written_tokens: int = 0  # of the prompt, that it computed and made findable in the stays that are over
    sent_before: int = 0  # `num_sent_tokens` of the stays that are over
    fresh_logprobs: list[TokenLogprobs] = field(default_factory=list)  # that did not leave yet
    num_logprob_positions: int = 0  # of its tokens, those before this one were reported
    may_copy: bool = True  # from a block that is cached; not after that was refused
    no_room: NoCapacityReason | None = None  # why its last acquire was refused
    asked_under: LeaseId = NO_LEASE  # it asked under this id in vain and does so again: the cache may remember it
    flight_until_ns: int = 0  # until then it may wait for another's prefill; 0: it has not waited in this stay
    wake_ns: int = 0  # when a sleeper asks again, woken or not
    family: Family | None = None  # the others with its prompt
    history: History = field(default_factory=lambda: History(StageKind.QUEUED, 0))
    chunks: list[Chunk] = field(default_factory=list)

    def all_output(self) -> bytearray:
        """Output so far, packed u32, without a stop token."""
        if self.sequence is not None:
            self.sequence.fold()
        return self.output

    def all_tokens(self) -> bytes:
        """Prompt and output so far, packed u32, without a stop token."""
        output = self.all_output()
        return self.request.tokens + output if output else self.request.tokens

    @property
    def num_tokens(self) -> int:
        if self.sequence is None:
            return self.num_prompt_tokens + len(self.output) // TOKEN_BYTES
        return self.sequence.num_known

    @property
    def num_sent_tokens(self) -> int:
        """That left for the client; the prompt counts as left."""
        return self.sent_before if self.sequence is None else int(self.sequence.table.num_sent[self.sequence.slot])

    @num_sent_tokens.setter
    def num_sent_tokens(self, count: int) -> None:
        if self.sequence is None:
            self.sent_before = count
        else:
            self.sequence.table.num_sent[self.sequence.slot] = count

    @property
    def num_output_tokens(self) -> int:
        """A stop token does not count: it ends the request."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_max(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + self.max_output_tokens

    @property
    def num_kv_tokens_max(self) -> int:
        """KV positions that it can ever need: the last token's KV is never computed."""
        return self.num_prompt_tokens + self.max_output_tokens - 1

    @property
    def outcome(self) -> Outcome:
        """Of the answer, which is whole."""
        opens = self.request.call_opens
        if opens is None:
            return Outcome.UNKNOWN
        has_called = (np.frombuffer(bytes(self.all_output()), "<u4") == opens).any()
        return Outcome.CALLED_TOOLS if has_called else Outcome.CALLED_NONE

    @property
    def wants_logprobs(self) -> bool:
        sampling = self.request.sampling
        return sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None

    def start_wanting(self, shares: FairShares) -> None:
        if not self.wants:
            self.wants = True
            shares.enter(self.tenant_number)

    def stop_wanting(self, shares: FairShares) -> None:
        if self.wants:
            self.wants = False
            shares.leave(self.tenant_number)

    def note_written(self) -> None:
        """Count whole blocks of the prompt that its lease made findable beyond those it found."""
        lease = self.lease
        if lease is not None and lease.publishable:
            whole = self.num_prompt_tokens // lease.block_size * lease.block_size
            full = min(lease.num_full_blocks * lease.block_size, whole)
            self.num_written_tokens = max(self.num_written_tokens, full - self.num_cached_tokens)

    def note_chunk(self, start_ns: int, end_ns: int, num_tokens: int) -> None:
        if len(self.chunks) < CHUNKS_MAX:
            self.chunks.append((start_ns, end_ns, num_tokens))


def state_of(request: Request, order: tuple[int, int], max_context: int) -> RequestState:
    """Of a request that comes in, with what another planner had computed of it."""
    num_prompt = len(request.tokens) // TOKEN_BYTES
    state = RequestState(
        request=request,
        order=order,
        num_prompt_tokens=num_prompt,
        max_output_tokens=min(request.max_new_tokens, max_context - num_prompt),
        sent_before=num_prompt,
    )
    resumed = request.resumed
    if resumed is not None:
        state.output += resumed.sent
        state.sent_before += len(resumed.sent) // TOKEN_BYTES
        state.num_logprob_positions = resumed.num_logprob_positions
        state.num_retries = resumed.num_moves
        if resumed.num_cached_tokens is not None:
            state.num_cached_tokens, state.num_grants = resumed.num_cached_tokens, 1
    return state


def blocks_together(block_size: int) -> int:
    return min(OUTPUT_BLOCKS_TOGETHER, max(1, OUTPUT_TOKENS_TOGETHER // block_size))


@dataclass(slots=True, eq=False)
class Family:
    """Requests with one prompt that have not ended, in the order in which they came; see `forks.py`."""

    leader: RequestState  # computes the prompt, or did
    members: dict[str, RequestState] = field(default_factory=dict)
    waiting: dict[str, RequestState] = field(default_factory=dict)
    is_computed: bool = False


class Sequence:
    """One stay of a request on one worker, under one lease. Its counts may be asked for while it is live."""

    __slots__ = ("grown", "lease", "request", "sequence_id", "slot", "source", "state", "table", "zero")

    def __init__(
        self,
        sequence_id: SequenceId,
        request: RequestState,
        lease: Lease,
        table: SlotTable[Sequence],
        *,
        num_cached: int,
        num_ahead: int,
    ) -> None:
        """Its lease was just granted, with the KV of `num_cached` tokens; for `num_ahead` positions beyond its next
        token it should own blocks, too."""
        self.sequence_id = sequence_id
        self.request = request
        self.lease = lease
        self.table = table
        self.state = SequenceState.GRANTED
        self.grown = bytearray()  # owned handles that the worker was not told yet
        self.zero = bytearray()  # handles to zero before their first write
        self.source: Sequence | None = None  # that it copies its prompt from
        self.slot = slot = table.add(self, request.request.number, request.request.stop_token_ids)
        table.num_known[slot] = table.num_start[slot] = request.num_tokens
        table.num_computed[slot] = table.num_planned[slot] = num_cached
        table.num_reserved[slot] = lease.reserved_tokens
        table.num_ahead[slot] = num_ahead
        table.num_max[slot] = request.num_tokens_max
        table.num_sent[slot] = request.sent_before
        self.look_again()
        table.tenants[slot] = request.tenant_number
        table.has_first[slot] = bool(request.first_token_ns)
        table.is_plain[slot] = request.request.streams and not request.wants_logprobs
        table.is_watched[slot] = request.request.streams and request.wants_logprobs

    # --- counts

    @property
    def num_known(self) -> int:
        return int(self.table.num_known[self.slot])

    @property
    def num_start_tokens(self) -> int:
        """Tokens known when it was granted: up to here it is prefill."""
        return int(self.table.num_start[self.slot])

    @property
    def num_computed(self) -> int:
        return int(self.table.num_computed[self.slot])

    @property
    def num_planned(self) -> int:
        return int(self.table.num_planned[self.slot])

    @property
    def num_pending(self) -> int:
        return int(self.table.num_pending[self.slot])

    @property
    def num_to_plan(self) -> int:
        return self.num_known + self.num_pending - self.num_planned

    @property
    def live(self) -> bool:
        return self.state is SequenceState.GRANTED or self.state is SequenceState.ATTACHED

    @property
    def is_copying(self) -> bool:
        """Its prompt counts as computed, but no result has said yet that the copy was made."""
        return self.source is not None and self.num_computed < self.request.num_prompt_tokens

    @property
    def blocked(self) -> bool:
        """Its next token has no block."""
        return self.num_planned >= self.lease.reserved_tokens

    # --- moves

    def start_at(self, num_tokens: int) -> None:
        """Before it is attached: so many tokens will have KV then, shared or copied."""
        assert self.state is SequenceState.GRANTED
        table, slot, size = self.table, self.slot, self.lease.block_size
        table.num_computed[slot] = table.num_planned[slot] = num_tokens
        table.next_look[slot] = (num_tokens // size + 1) * size

    def look_again(self) -> None:
        """Note when its full blocks are published next."""
        lease, table, slot = self.lease, self.table, self.slot
        size, num_full = lease.block_size, lease.num_full_blocks
        is_prefill = num_full < table.num_start[slot] // size
        table.next_look[slot] = (num_full + (1 if is_prefill else blocks_together(size))) * size

    def attach(self) -> None:
        self.state = SequenceState.ATTACHED
        self.table.attached[self.slot] = True

    def stop(self) -> None:
        """No more of it is planned; the worker still has it."""
        assert self.state is SequenceState.ATTACHED
        self.state = SequenceState.CLOSING

    def detach(self) -> None:
        """A plan that tells the worker to drop it is on its way."""
        assert self.state is SequenceState.CLOSING
        self.state = SequenceState.REMOVING

    def end(self) -> None:
        """No step can touch its blocks any more."""
        self.state = SequenceState.REMOVED

    def take_blocks(self, owned: bytes, zero: bytes, num_ahead: int) -> None:
        """Its lease has grown by these."""
        self.grown += owned
        self.zero += zero
        self.table.num_reserved[self.slot] = self.lease.reserved_tokens
        self.table.num_ahead[self.slot] = num_ahead
        self.table.has_news[self.slot] = True

    def forgo_ahead(self) -> None:
        """It asked for blocks ahead of need in vain: from now on for no more than the need."""
        self.table.num_ahead[self.slot] = 0

    def fold(self) -> None:
        """The newest tokens join the request's output."""
        self.request.output += self.table.take_tail(self.slot)

    def leave_table(self) -> None:
        """What its slot knows of the request goes back there."""
        self.fold()
        self.request.sent_before = int(self.table.num_sent[self.slot])
        self.table.remove(self.slot)
