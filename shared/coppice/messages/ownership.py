"""Who plans for which worker, as schedulers tell the cache service: what they give up, and whose place they take."""

from __future__ import annotations

from typing import ClassVar

from coppice.ids import U64, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.record import Message, Record


class SessionName(Record, frozen=True):
    """A session of a scheduler as its Hello shows it, with the last voucher that it was told."""

    key: bytes
    incarnation: U64
    epoch: SchedulerEpoch
    voucher: bytes


class Succeed(Message, frozen=True):
    """Whoever had this session is gone for good, says who comes after it: it ends as if it had expired.

    Without the right voucher the message has no effect. To name one's own session is a goodbye. A cache service
    that does not have it ends the session later, when it has been silent.
    """

    SINCE: ClassVar[int] = 7
    session: SessionName


class Yielded(Message, frozen=True):
    """Nothing of this session is left on the worker, which it was asked for: it may be another's."""

    SINCE: ClassVar[int] = 7
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
