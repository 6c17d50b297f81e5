"""What comes out of the core: small values, and effects for the edge to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
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


Effect = ToClientEffect | ToWorkerEffect | SessionEnded | WorkerEnded | Reincarnate


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
    """One node of a dumped tree. Nodes stand in preorder; `parent` is the index of the parent, the root's own is 0."""

    parent: int
    depth: int
    num_blocks: int
    num_pins: int
    num_children: int
    last_use_ns: int
    first_seal: str  # hex, empty at the root


@dataclass(frozen=True, slots=True)
class TreeView:
    worker_id: WorkerId
    namespace: Namespace
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class TreeDump:
    """All trees of a domain; `truncated` when the depth or the limit left nodes out."""

    domain: DomainId
    trees: tuple[TreeView, ...]
    truncated: bool
