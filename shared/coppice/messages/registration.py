"""Messages between a worker and the cache service, on the session that the worker opens.

worker -> cache   Register, FenceAck, Draining, CopiesDone
cache -> worker   Registered, Fence, CopyOrders
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coppice.ids import CacheEpoch, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId


@dataclass(frozen=True, slots=True)
class Register:
    """First message on every fresh session with a cache service; reports what the worker's blocks really are."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch  # 0 when the pool is new: the cache mints one
    address: str
    num_blocks: int
    block_size: int
    namespace: Namespace
    model: str
    highest_cache_epoch: CacheEpoch  # highest that ever registered this worker (rule 9)
    generations: bytes  # u64 [num_blocks]; 0 = never granted
    seals: bytes  # 16 bytes x num_blocks; zeros = unsealed
    scheduler_epochs: tuple[SchedulerEpoch, ...]  # sessions with live sequences here, or that may still send
    max_sequences: int = 0  # attached at once; 0 = not said, here and in the next two
    max_step_tokens: int = 0  # computed in one step
    max_context: int = 0  # tokens of one sequence
    draining: bool = False  # takes no new lease; what it has goes on to its end
    num_host_blocks: int = 0  # size of the host tier's pool; 0 = there is none
    host_generations: bytes = b""
    host_seals: bytes = b""


@dataclass(frozen=True, slots=True)
class Registered:
    """`worker_epoch` differs from the reported one when the old epoch is dead: the worker quiesces and starts over."""

    worker_epoch: WorkerEpoch
    cache_epoch: CacheEpoch


@dataclass(frozen=True, slots=True)
class Fence:
    """From the acknowledgement on, nothing of what is named runs or will ever run on this worker.

    Named are `scheduler_epochs`, every epoch <= `up_to_epoch` that is not in `spared`, and `lease_ids`.
    """

    fence_id: int
    worker_epoch: WorkerEpoch
    scheduler_epochs: tuple[SchedulerEpoch, ...] = ()
    up_to_epoch: SchedulerEpoch = SchedulerEpoch(0)
    spared: tuple[SchedulerEpoch, ...] = ()
    lease_ids: tuple[LeaseId, ...] = ()
    report: bool = False  # the acknowledgement carries the arrays again (rule 8)


@dataclass(frozen=True, slots=True)
class FenceAck:
    fence_id: int
    worker_epoch: WorkerEpoch
    generations: bytes = b""
    seals: bytes = b""
    host_generations: bytes = b""
    host_seals: bytes = b""


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker takes no new lease from now on; a later Register says so too."""

    worker_epoch: WorkerEpoch


class Direction(Enum):
    DEMOTE = "demote"  # device to host
    PROMOTE = "promote"  # host to device


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy blocks between tiers. The cache service holds both ends until CopiesDone names the order."""

    order_id: int
    direction: Direction
    src: bytes  # handles in the tier that is left
    dst: bytes  # handles in the tier that is entered
    seals: bytes  # of the content, one per block


@dataclass(frozen=True, slots=True)
class CopyOrders:
    worker_epoch: WorkerEpoch
    orders: tuple[CopyOrder, ...]


@dataclass(frozen=True, slots=True)
class CopiesDone:
    worker_epoch: WorkerEpoch
    order_ids: tuple[int, ...] = ()
    failed_ids: tuple[int, ...] = ()  # refused or broken off: the destinations hold nothing


FromWorker = Register | FenceAck | Draining | CopiesDone
ToWorker = Registered | Fence | CopyOrders
