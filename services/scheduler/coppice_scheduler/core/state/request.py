"""What goes into the scheduler and what comes out: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from coppice.ids import U32, DomainId, WorkerId
from coppice.messages.index import FromClient
from coppice.messages.record import PackedU32, Record
from coppice.messages.reuse import Reuse
from coppice.messages.step import SamplingParams, StepPlan, TokenLogprobs
from coppice.request_log.stages import Stage

Chunk = tuple[int, int, int]  # of a prompt: (start_ns, end_ns, tokens)


class Resumed(Record, frozen=True):
    """What had become of a request when the planner that served it was lost. Another goes on behind it.

    The seed and the positions from which it counts are the request's own, so what follows is what would have followed.
    """

    sent: PackedU32 = b""  # output tokens that its front door has
    num_logprob_positions: int = 0  # of prompt and output, those before this one were reported to it
    num_cached_tokens: int | None = None  # as its first grant found; None: none was heard of
    num_moves: int = 1  # times that it was moved, with this one


class Request(Record, frozen=True):
    """One prompt to continue. The front door has put the model's end tokens into `stop_token_ids` where they count."""

    request_id: str
    tenant: str
    domain: DomainId
    tokens: PackedU32  # the prompt, packed u32
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower goes first
    arrived_ns: int = 0
    traceparent: str = ""  # W3C trace context; travels with the request to the cache service and the worker
    number: U32 = 0  # u32, names it in a TokenBatch; unique among those at work
    streams: bool = True  # its tokens leave as they are sampled; False: all with the last Output
    deadline_ns: int | None = None  # after it the answer is worth nothing
    fork_of: str | None = None  # request id of another with the same prompt, whose prefill this one shares
    reuse: Reuse = Reuse.UNKNOWN  # what the client knows of the future of its prompt
    retain_ms: int = 0  # keep the prompt's blocks for so long after it was computed
    salt: bytes = b""  # SALT_BYTES of `digest_salt`: its prefixes are shared with this salt alone; empty = none
    names: tuple[str, ...] = ()  # that its tenant knows it by; others of that tenant may have the same
    num_places: int = 0  # above 0: it is no prompt but a call, open until it ends, with so many steps at once at most
    num_to_come: U32 = (
        1  # requests of its call from this one on: its tenant's concurrency has room for all, or for none
    )
    step_of: str | None = None  # request id of the open call that this is a step of
    resumed: Resumed | None = None  # it was served by another planner before
    call_kind: U32 = 0  # below CALL_KINDS; 0: not told apart
    call_opens: U32 | None = None  # the token with which its answer begins a call of a tool, where one token does


NOT_SERVED = "the tenant was removed or moved to another domain by the operator of this service"


class RefusedReason(Enum):
    QUEUE_FULL = "queue_full"
    TENANT_CONCURRENCY = "tenant_concurrency"
    TENANT_QUEUE = "tenant_queue"
    TOO_LONG = "too_long"  # the prompt leaves no room for a token within the context
    NEVER_FITS = "never_fits"  # more blocks than any known worker has
    EMPTY = "empty"  # no prompt token, or no token wanted
    DRAINING = "draining"
    CALL_ENDED = "call_ended"  # that it is a step of
    TENANT_RATE = "tenant_rate"  # its requests or tokens of this minute are used up
    TENANT_REMOVED = "tenant_removed"  # or moved to another domain, since the request was authenticated
    DEADLINE = "deadline"  # by all estimates its deadline comes first
    QUARANTINED = "prompt_quarantined"  # workers were lost while they computed its prompt
    INTERNAL = "internal"  # a fault of ours; nothing was changed by it


class Refused(Record, frozen=True):
    """The request was not taken; nothing was reserved and no Output will come."""

    reason: RefusedReason
    message: str
    retry_after_ms: int  # 0 where trying again cannot help


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class OutputErrorCode(Enum):
    WORKER_LOST = "worker_lost"
    QUARANTINED = "prompt_quarantined"  # more than one was lost, so it is not tried again
    SESSION_LOST = "session_lost"  # the cache service no longer knows the request's lease
    QUEUE_TIMEOUT = "queue_timeout"
    NEVER_FITS = "never_fits"
    TENANT_MAXIMUM = "tenant_maximum"  # its domain held all it may hold for too long
    TENANT_NOT_READY = "tenant_not_ready"  # the cache service's tenants file did not have its domain for too long
    DEADLINE = "deadline"  # the request's own
    TENANT_REMOVED = "tenant_removed"  # or moved to another domain
    KEY_REVOKED = "key_revoked"  # the key that the request came with
    ABORTED = "request_aborted"  # by its tenant, who named it
    GRAMMAR = "grammar_limit"  # its grammar takes more work than is done for one answer
    SCHEDULER_LOST = "scheduler_lost"  # the planner went away while it ran
    INTERNAL = "internal"


class OutputError(Record, frozen=True):
    code: OutputErrorCode
    message: str
    retry_after_ms: int = 0


class Output(Record, frozen=True):
    """New tokens of one request. Exactly one Output of a request has `finish`, and it is the last."""

    request_id: str
    tokens: PackedU32  # packed u32, new since the last Output; a stop token is never among them
    finish: Finish | None = None
    error: OutputError | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first grant found in the cache
    num_output_tokens: int = 0  # in all; a stop token counts
    stop_token: PackedU32 = b""  # packed u32: the token that ended it, where one did
    stages: tuple[Stage, ...] = ()  # in the last Output: all of its life
    chunks: tuple[Chunk, ...] = ()  # in the last Output: of the prompt, as they were computed
    logprobs: tuple[TokenLogprobs, ...] = ()  # new since the last Output, where the request wants them
    num_written_tokens: int = 0  # prompt tokens that it computed and made findable


class Granted(Record, frozen=True):
    """A request has its first grant: what the cache had of its prompt is known, and changes no more."""

    request_id: str
    num_cached_tokens: int


class Lookup(Record, frozen=True):
    """Where is this prompt cached? Asked by a front door that chooses between planners. Nothing is reserved by it."""

    number: U32  # `Request.number`
    domain: DomainId
    tokens: PackedU32  # packed u32
    salt: bytes = b""  # as `Request.salt`


class LookedUp(Record, frozen=True):
    """Workers of the whole cell, whoever plans for them, that have something of the prompt, and how much."""

    number: U32
    worker_ids: tuple[WorkerId, ...] = ()
    num_cached_tokens: tuple[int, ...] = ()


class TokenBatch(Record, frozen=True):
    """New tokens of many requests, in order; a request may stand there several times.

    Requests that stream and want no log-probabilities get their tokens so, but for those of the last Output.
    """

    numbers: PackedU32  # u32 [N], `Request.number`
    tokens: PackedU32  # u32 [N]


@dataclass(frozen=True, slots=True)
class Effects:
    """What the edge has to do now, in this order within each field."""

    to_index: tuple[FromClient, ...] = ()
    plans: tuple[tuple[WorkerId, StepPlan], ...] = ()
    granted: tuple[Granted, ...] = ()
    tokens: tuple[TokenBatch, ...] = ()  # before `outputs`
    outputs: tuple[Output, ...] = ()
    looked_up: tuple[LookedUp, ...] = ()


class TenantStats(Record, frozen=True):
    running: int
    waiting: int


class LimitLeft(Record, frozen=True):
    """Of a limit per minute."""

    limit: int
    left: int  # 0 or more
    full_ms: int  # until all of it is left again, if nothing more comes


class TenantLimitsLeft(Record, frozen=True):
    requests: LimitLeft | None  # None: no limit
    tokens: LimitLeft | None


class PoolUse(Record, frozen=True):
    """Of the workers that a scheduler plans for, together."""

    num_blocks: int = 0
    num_used_blocks: int = 0  # that requests at work hold
    block_size: int = 0  # tokens; 0: no worker is known


class SchedulerStats(Record, frozen=True):
    """Gauges of this moment and totals since the start."""

    running: int
    waiting: int
    waiting_tokens: int
    oldest_wait_ms: int
    tenants: Mapping[str, TenantStats]
    leases: int
    steps_in_flight: int
    total_preemptions: int
    total_retries: int
    total_prefill_tokens: int  # computed, completed
    total_cached_tokens: int  # found by grants instead of computed
    total_sampled_tokens: int
    total_steps: int  # results taken
    total_finished: int
    sleeping: int = 0  # of those waiting: another request computes their prefix
    total_flight_waits: int = 0  # times that a request waited for another's prefill
    total_reclaims: int = 0  # times that the cache service asked for borrowed blocks
    limits_left: Mapping[str, TenantLimitsLeft] = {}  # of tenants that have limits per minute and sent something
    pool: PoolUse = PoolUse()  # at most a second older
