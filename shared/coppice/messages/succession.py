"""What whoever comes after a scheduler that is gone says of its session, to the cache service."""

from __future__ import annotations

from coppice.ids import U64, SchedulerEpoch
from coppice.messages.record import Message, Record


class SessionName(Record, frozen=True):
    """A session of a scheduler as its Hello shows it, with the last voucher that it was told."""

    key: bytes
    incarnation: U64
    epoch: SchedulerEpoch
    voucher: bytes


class Succeed(Message, frozen=True):
    """Whoever had this session is gone for good, says who comes after it: it ends as if it had expired.

    Without the right voucher the message has no effect.
    """

    session: SessionName
