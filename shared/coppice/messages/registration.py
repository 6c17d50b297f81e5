"""Messages between a worker and the cache service, on the session that the worker opens.

worker -> cache   Register, FenceAck, Draining, CopiesDone
cache -> worker   Registered, Owner, Fence, CopyOrders
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from coppice.ids import U32, U64, CacheEpoch, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.record import Message, PackedGenerations, PackedHandles, PackedSeals, Record


class Register(Message, frozen=True):
    """First message on every fresh session with a cache service; reports what the worker's blocks really are."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch  # 0 when the pool is new: the cache mints one
    address: str
    num_blocks: U32
    block_size: U32
    namespace: Namespace
    model: str
    highest_cache_epoch: CacheEpoch  # that registered this worker last (rule 9)
    generations: PackedGenerations  # u64 [num_blocks]; 0 = never granted
    seals: PackedSeals  # 16 bytes x num_blocks; zeros = unsealed
    scheduler_epochs: tuple[SchedulerEpoch, ...]  # sessions with live sequences here, or that may still send
    max_sequences: U32 = 0  # attached at once; 0 = not said, here and in the next two
    max_step_tokens: U32 = 0  # computed in one step
    max_context: U32 = 0  # tokens of one sequence
    draining: bool = False  # takes no new lease; what it has goes on to its end
    num_host_blocks: U32 = 0  # size of the host tier's pool; 0 = there is none
    host_generations: PackedGenerations = b""
    host_seals: PackedSeals = b""
    voucher: bytes = b""  # of the last Registered, for its two epochs; without one the pool counts as new
    knows_owners: bool = False  # it takes plans of whom the cache service names; False: of the newest session
    num_disk_blocks: U32 = 0  # size of the disk tier's pool, below the host tier; 0 = there is none
    disk_generations: PackedGenerations = b""
    disk_seals: PackedSeals = b""
    disk_epoch: WorkerEpoch = WorkerEpoch(0)  # which the blocks on the disk belong to, of an earlier process perhaps


class Registered(Message, frozen=True):
    """`worker_epoch` differs from the reported one when the old epoch is dead: the worker quiesces and starts over."""

    worker_epoch: WorkerEpoch
    cache_epoch: CacheEpoch
    voucher: bytes = b""  # for both; to be shown in the next Register
    scheduler_key: bytes = b""  # by which it knows scheduler epochs that the cache service vouches for
    owner: SchedulerEpoch = SchedulerEpoch(0)  # whose plans it takes, and nobody else's; 0: nobody is named
    keeps_disk: bool = False  # in a new epoch: what is on the disk belongs to it as well; False: nothing is there


class Owner(Message, frozen=True):
    """Another scheduler plans for the worker from now on. Concerns nobody who is not registered as that epoch."""

    SINCE: ClassVar[int] = 7
    worker_epoch: WorkerEpoch
    owner: SchedulerEpoch


class Fence(Message, frozen=True):
    """From the acknowledgement on, nothing of what is named runs or will ever run on this worker.

    Named are `scheduler_epochs`, every epoch <= `up_to_epoch` that is not in `spared`, and `lease_ids`.
    """

    fence_id: U64
    worker_epoch: WorkerEpoch
    scheduler_epochs: tuple[SchedulerEpoch, ...] = ()
    up_to_epoch: SchedulerEpoch = SchedulerEpoch(0)
    spared: tuple[SchedulerEpoch, ...] = ()
    lease_ids: tuple[LeaseId, ...] = ()
    report: bool = False  # the acknowledgement carries the arrays again (rule 8)


class FenceAck(Message, frozen=True):
    fence_id: U64
    worker_epoch: WorkerEpoch
    generations: PackedGenerations = b""
    seals: PackedSeals = b""
    host_generations: PackedGenerations = b""
    host_seals: PackedSeals = b""
    disk_generations: PackedGenerations = b""
    disk_seals: PackedSeals = b""


class Draining(Message, frozen=True):
    """The worker takes no new lease from now on; a later Register says so too."""

    worker_epoch: WorkerEpoch


class Direction(Enum):
    DEMOTE = "demote"  # device to host
    PROMOTE = "promote"  # host to device
    STORE = "store"  # host to disk; said, as LOAD is, to a worker that has registered blocks of a disk
    LOAD = "load"  # disk to host


class CopyOrder(Record, frozen=True):
    """Copy blocks between tiers. The cache service holds both ends until CopiesDone names the order."""

    order_id: U64
    direction: Direction
    src: PackedHandles  # handles in the tier that is left
    dst: PackedHandles  # handles in the tier that is entered
    seals: PackedSeals  # of the content, one per block


class CopyOrders(Message, frozen=True):
    worker_epoch: WorkerEpoch
    orders: tuple[CopyOrder, ...]


NOTHING_LOST = (1 << 32) - 1  # the order failed, and its source has all that it had


class CopiesDone(Message, frozen=True):
    """How copies ended, and what the worker measured of late; also without any copy, when that has changed."""

    worker_epoch: WorkerEpoch
    order_ids: tuple[U64, ...] = ()
    failed_ids: tuple[U64, ...] = ()  # refused or broken off: the destinations hold nothing
    prefill_ns_per_token: U32 = 0  # 0 = not known
    copy_ns_per_block: U32 = 0  # between device and host; 0 = not known
    disk_ns_per_block: U32 = 0  # of a load between host and disk; 0 = not known
    # Of each failed order the first of its blocks that its source has lost; of one that is not named, all of them.
    lost_from: tuple[U32, ...] = ()


FromWorker = Register | FenceAck | Draining | CopiesDone
ToWorker = Registered | Owner | Fence | CopyOrders
