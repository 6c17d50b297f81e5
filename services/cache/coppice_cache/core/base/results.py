"""What comes out of the core: small values, and effects for the edge to carry out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import ToClient
from coppice.messages.registration import ToWorker


@dataclass(frozen=True, slots=True)
class Match:
    """What an acquire of these tokens would share now: whole blocks, and never the last token."""

    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ToClientEffect:
    epoch: SchedulerEpoch
    message: ToClient


@dataclass(frozen=True, slots=True)
class ToWorkerEffect:
    worker_id: WorkerId
    message: ToWorker


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is over for good: its epoch never attaches again."""

    epoch: SchedulerEpoch


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    worker_id: WorkerId
    worker_epoch: WorkerEpoch


@dataclass(frozen=True, slots=True)
class Reincarnate:
    """This core may not grant any more: build a new one with this epoch (rule 9)."""

    cache_epoch: CacheEpoch


@dataclass(frozen=True, slots=True)
class Regrown:
    """A worker's trees are back after a restart, all at once: followers need a fresh snapshot."""

    worker_id: WorkerId


Effect = ToClientEffect | ToWorkerEffect | SessionEnded | WorkerEnded | Reincarnate | Regrown


@dataclass(frozen=True, slots=True)
class DomainStats:
    """One domain on one worker. Blocks count by state; the token counters only ever grow."""

    worker_id: WorkerId
    domain: DomainId
    leased_blocks: int
    cached_blocks: int
    draining_blocks: int
    pinned_blocks: int
    guarantee_blocks: int
    maximum_blocks: int
    leases: int
    hit_tokens: int
    query_tokens: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    open: bool
    num_blocks: int
    free_blocks: int
    leased_blocks: int
    cached_blocks: int
    draining_blocks: int
    leases: int
    fences: int
    trees: int
    nodes: int
    domains: tuple[DomainStats, ...]
    num_host_blocks: int = 0  # of the host tier; none of the counts above is of it
    host_free_blocks: int = 0
    host_leased_blocks: int = 0  # that copies write
    host_cached_blocks: int = 0
    num_disk_blocks: int = 0  # of the disk tier; the same of it
    disk_free_blocks: int = 0
    disk_leased_blocks: int = 0
    disk_cached_blocks: int = 0
    copies: int = 0  # under way between tiers, in all directions
    draining: bool = False  # it takes no new lease
    owner: int = 0  # epoch of the session that plans for it; 0: nobody does


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Totals over all workers, then each of them."""

    cache_epoch: CacheEpoch
    sessions: int
    leases: int
    pins: int
    nodes: int
    free_blocks: int
    leased_blocks: int
    cached_blocks: int
    draining_blocks: int
    hit_tokens: int
    query_tokens: int
    evicted_blocks: int
    workers: tuple[WorkerStats, ...]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of a dumped tree. It is named by the seal of its first block, in hex; a root has no name."""

    node: str
    parent: str
    depth: int  # nodes from the root
    first_block: int  # blocks from the root
    num_blocks: int
    num_pins: int
    num_children: int
    last_use_ns: int


@dataclass(frozen=True, slots=True)
class TreeView:
    """Nodes of one tree in preorder; a later page of it starts without the root."""

    worker_id: WorkerId
    namespace: Namespace
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class PinView:
    """One operator's pin on one worker; without a worker when none has cached any of it."""

    name: str
    domain: DomainId
    namespace: Namespace
    worker_id: WorkerId
    num_tokens: int  # pinned now


@dataclass(frozen=True, slots=True)
class TreeDump:
    """One page over all trees of a domain."""

    domain: DomainId
    trees: tuple[TreeView, ...]
    next_page_token: str  # empty: complete
    cut_by_depth: bool  # nodes below the greatest depth were left out
    moved: bool  # where the page before ended is gone; nodes may be missing or come twice

    @property
    def truncated(self) -> bool:
        return bool(self.next_page_token) or self.cut_by_depth


class StoppedBy(Enum):
    """Why a match goes no further."""

    LAST_TOKEN = "last_token"  # something must be computed for a sample
    END_OF_PROMPT = "end_of_prompt"  # what is left fills no block
    PARTIAL_BLOCK = "partial_block"  # likewise, and a cached block begins with it
    OTHER_TOKENS = "other_tokens"  # the tree goes on, with other tokens
    NOTHING_CACHED = "nothing_cached"  # the tree ends here
    PENDING = "pending"  # a live lease is computing what follows
    NO_TREE = "no_tree"
    NOT_OPEN = "not_open"  # after a restart, until the worker's window has closed


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a prompt would find in one tree of one worker."""

    worker_id: WorkerId
    namespace: Namespace
    num_cached_tokens: int
    stopped_by: StoppedBy
    sentence: str
    partial_tokens: int = 0  # of the first block that does not match whole, tokens that agree
    pending_tokens: int = 0  # further tokens that a live lease is computing
    lease_ids: tuple[LeaseId, ...] = ()  # pinned at or below the end of the match; some of them when they are many
    path: tuple[str, ...] = ()  # hex of the first seal of each node on the way
