"""Explicit retention: what a client asked to keep goes after everything of lower priority in its domain.

tokens     0 ........ first_token ......... end_token ........
blocks     [   ][   ][   |  kept  ][   kept  |  ][   ]          whole blocks that the range touches
"""

from __future__ import annotations

from coppice.messages.index import RETAIN_PRIORITY_MAX, Answer, Retain, Retained
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.radix.tree import MatchPosition, Node, path
from coppice_cache.core.state.workers import Worker

_NS_PER_MS = 1_000_000
DURATION_MS_MAX = 30 * 24 * 3_600_000


def retain(worker: Worker, lease: Lease, op: Retain, now_ns: int) -> Answer:
    """What the lease has published of the range is kept from now on; a later retention of it replaces this one.

    Raises OpRefused for a range, a priority or a duration that means nothing.
    """
    _check(op)
    size = worker.block_size
    first, end = op.first_token // size, min(-(-op.end_token // size), lease.num_settled)
    if lease.tree is None or not worker.is_findable(lease) or end <= first:
        return Retained(op.lease_id, 0)
    nodes = _nodes_between(worker, lease, first, end)
    lease.account.eviction.retain(nodes, op.priority, now_ns + op.duration_ms * _NS_PER_MS)
    covered = min(op.end_token, end * size) - op.first_token
    return Retained(op.lease_id, covered)


def _nodes_between(worker: Worker, lease: Lease, first: int, end: int) -> list[Node]:
    """The nodes of the lease's path that hold blocks [first, end) and no other; edges are split for that."""
    for at in (first, end):
        _cut_at(worker, lease, at)
    found, depth = [], 0
    for node in path(lease.node):
        if first <= depth < end:
            found.append(node)
        depth += node.num_blocks
    return found


def _cut_at(worker: Worker, lease: Lease, at: int) -> None:
    depth = 0
    for node in path(lease.node):
        if depth < at < depth + node.num_blocks:
            worker.split(lease.account, MatchPosition(node, at - depth, at))
            return
        depth += node.num_blocks


def _check(op: Retain) -> None:
    if not 0 <= op.first_token < op.end_token:
        raise OpRefused(f"tokens {op.first_token} to {op.end_token} are no range")
    if not 0 <= op.priority <= RETAIN_PRIORITY_MAX:
        raise OpRefused(f"priority {op.priority} must lie between 0 and {RETAIN_PRIORITY_MAX}")
    if not 0 <= op.duration_ms <= DURATION_MS_MAX or (op.priority and not op.duration_ms):
        raise OpRefused(f"duration_ms {op.duration_ms} must lie between 1 and {DURATION_MS_MAX}")
