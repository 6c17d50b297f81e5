"""What is said of a call that came with an `Idempotency-Key`, between a front door and the planner's process.

Claim  ->  MINE      this call computes; a Settled follows, whatever becomes of it
           ANSWERED  the first call's outcome, at once or when it has one
           ANOTHER   the key was used for another call
           CROWDED   too many calls wait for the same one
           UNKEPT    the tenant's room is taken by calls at work; this one computes, and is not kept
           LOST      the first call's outcome cannot be told
"""

from __future__ import annotations

from enum import Enum

from coppice.messages.record import Message, Record

ANSWER_BYTES_MAX = 1024 * 1024  # a longer answer is not kept


class ClaimState(Enum):
    MINE = "mine"
    ANSWERED = "answered"
    ANOTHER = "another"
    CROWDED = "crowded"
    UNKEPT = "unkept"
    LOST = "lost"


class FirstOutcome(Record, frozen=True):
    """How the first call with a key ended: with an answer, or with an error, whose `kind` names an ErrorKind."""

    body: bytes = b""
    ignored: str = ""  # of the header that lists what was taken without effect
    kind: str = ""  # empty: it was answered
    message: str = ""
    param: str | None = None
    code: str | None = None
    retry_after_ms: int = 0


class Claim(Message, frozen=True):
    """A call of this tenant came with a key. Both are digests."""

    number: int  # of the claim; unique for its front door
    tenant: str
    key: bytes
    call: bytes  # route and body
    is_strict: bool  # the tenant keeps within its own room


class Claimed(Message, frozen=True):
    """`outcome` comes with ANSWERED alone."""

    number: int
    state: ClaimState
    outcome: FirstOutcome | None = None


class Settled(Message, frozen=True):
    """A call whose claim was MINE has ended. None: its outcome is too long, or nobody knows it."""

    number: int
    outcome: FirstOutcome | None
