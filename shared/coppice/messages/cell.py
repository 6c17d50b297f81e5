"""What the planners of a cell tell each other of their tenants, by way of the cache service.

    planner                     cache service                       every other planner
    Served  ------------------> keeps the sums of each session ---> ServedElsewhere
                                a session begins or ends       ---> Planners

Sums grow from where the planner's session began, so what is said twice counts once. All of it goes to planners only.
"""

from __future__ import annotations

from typing import ClassVar

from coppice.ids import U32, U64, CacheEpoch, SchedulerEpoch
from coppice.messages.record import Message, Record

CELL_TICK_MS = 100  # a planner tells its sums at multiples of this, if they changed
TENANTS_TOLD_MAX = 16_384  # of one session; limits and shares of any further tenant are each planner's own
SUM_MAX = (1 << 53) - 1  # exact as a float as well


class TenantSums(Record, frozen=True):
    """Of one tenant at one planner. The last two are how it is now."""

    tenant: str
    num_prefill_tokens: U64  # planned
    num_output_tokens: U64
    num_requests: U64  # charged to its limit of requests per minute
    num_prompt_tokens: U64  # charged to its limit of tokens per minute; outputs are charged beside them
    num_at_work: U32  # as `max_concurrency` counts: running, waiting, and spare places of open calls
    wants: bool  # some prompt of it is not planned to its end


class Served(Message, frozen=True):
    """Tenants whose sums changed since this was said last."""

    SINCE: ClassVar[int] = 7
    tenants: tuple[TenantSums, ...]
    is_whole: bool  # all tenants that have any: the first one of an attachment


class ServedElsewhere(Message, frozen=True):
    """What another planner said, or all of it that the cache service has, at an attachment."""

    SINCE: ClassVar[int] = 7
    cache_epoch: CacheEpoch
    epoch: SchedulerEpoch  # of the planner
    tenants: tuple[TenantSums, ...]
    is_whole: bool


class Planners(Message, frozen=True):
    """All other sessions of planners; said when that changes. A planner that is told nothing is alone."""

    SINCE: ClassVar[int] = 7
    cache_epoch: CacheEpoch
    epochs: tuple[SchedulerEpoch, ...]


CellNews = Planners | ServedElsewhere
