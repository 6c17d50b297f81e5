"""Replays prompts over the core's own radix tree and eviction policies, without leases and ledger around them.

Each request is stored whole, hits are prefix hits, and what it brings is known to the policy, like in the service. The
last block of a prompt counts although it is not full; the service never caches such a block, so here the policy is told
what it would know of one: reuse is unlikely. That is always right, so it has a kind of call of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId, Namespace
from coppice.messages.reuse import Outcome, Reuse
from coppice.seals import NO_CHAIN_KEY
from coppice_bench.trace.file import Trace
from coppice_cache.core.eviction.policy import NO_HINT, EvictionPolicy, ReuseHint
from coppice_cache.core.radix.tree import Node, Tree, add_child, path, split_edge, walk

_BLOCK_BYTES = 8  # of an id, which stands for the tokens of its block
_SEAL_REST = bytes(8)
_NS_PER_MS = 1_000_000
_LEASE = 1
_IN_PART = ReuseHint(Reuse.UNLIKELY, call_kind=8)  # which no front door gives


@dataclass(frozen=True, slots=True)
class Replayed:
    """`operations` are blocks used, stored and evicted."""

    hits: int
    blocks: int
    operations: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks

    @property
    def us_per_operation(self) -> float:
        return self.seconds * 1e6 / self.operations


class Replay:
    """One tree of at most `capacity` blocks."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._tree = Tree(DomainId("trace"), Namespace(b""), NO_CHAIN_KEY, _BLOCK_BYTES)
        self.num_cached = 0
        self.num_evicted = 0

    def request(self, ids: tuple[int, ...], now_ns: int, *, ends_in_part: bool, hint: ReuseHint = NO_HINT) -> int:
        """Returns the number of blocks that were found. What exceeds the capacity is not stored."""
        tokens = array("q", ids[: self._capacity]).tobytes()
        spot = walk(self._tree, tokens, _BLOCK_BYTES)
        node = split_edge(spot, _BLOCK_BYTES)
        if node is not spot.node:
            self._policy.split(node, spot.node)
        new = len(tokens) // _BLOCK_BYTES - spot.num_blocks
        asked = hint._replace(outcome=Outcome.UNKNOWN)  # what is known before it has an answer
        self._policy.touched(path(node), new, asked, self.num_cached, now_ns)
        node.pin(_LEASE)
        node.last_use_ns = now_ns
        self._evict(self.num_cached + new - self._capacity)
        parts = self._parts(tokens[spot.num_blocks * _BLOCK_BYTES :], asked, ends_in_part)
        deepest = self._store(node, parts, new, now_ns)
        if hint.outcome is not Outcome.UNKNOWN and not deepest.children and not ends_in_part:
            self._policy.hinted(deepest, hint)
        node.unpin(_LEASE)
        self._policy.offer(deepest)
        return spot.num_blocks

    @staticmethod
    def _parts(tokens: bytes, hint: ReuseHint, ends_in_part: bool) -> list[tuple[bytes, ReuseHint]]:
        """What is new, and what is said of it; an empty part is none."""
        cuts = [0, len(tokens) - _BLOCK_BYTES * ends_in_part, len(tokens)]
        parts = [tokens[max(0, start) : max(0, end)] for start, end in pairwise(cuts)]
        return [(part, said) for part, said in zip(parts, (hint, _IN_PART), strict=True) if part]

    def _store(self, node: Node, parts: list[tuple[bytes, ReuseHint]], new: int, now_ns: int) -> Node:
        for part, hint in parts:
            node = add_child(node, part, bytes(len(part)), block_bytes=_BLOCK_BYTES, now_ns=now_ns)
            self._policy.created(node, _seals(part), new, hint)
        self.num_cached += new
        return node

    def _evict(self, count: int) -> None:
        self.num_evicted += max(0, count)
        while count > 0:
            node = self._policy.coldest()
            parent, taken = node.parent, min(count, node.num_blocks)
            assert parent is not None
            first = (node.num_blocks - taken) * _BLOCK_BYTES
            seal = _seals(node.tokens[first : first + _BLOCK_BYTES])
            self._policy.evicted(node, seal, is_whole=first == 0)
            node.trim(taken, _BLOCK_BYTES)
            self.num_cached -= taken
            count -= taken
            if not node.handles:
                self._policy.offer(parent)


def _seals(tokens: bytes) -> bytes:
    """Equal ids mean equal prompts up to there, so an id is as good as a seal."""
    return b"".join(tokens[start : start + HANDLE_BYTES] + _SEAL_REST for start in range(0, len(tokens), _BLOCK_BYTES))


def replay(trace: Trace, policy: EvictionPolicy, capacity: int, hints: Sequence[ReuseHint] = ()) -> Replayed:
    """`hints`: one for each request, or none."""
    began, now_ns, hits, stored = perf_counter(), 0, 0, 0
    run = Replay(policy, capacity)
    for request, hint in zip(trace.requests, hints or [NO_HINT] * len(trace.requests), strict=True):
        now_ns = max(now_ns + 1, request.at_ms * _NS_PER_MS)
        found = run.request(request.hash_ids, now_ns, ends_in_part=trace.ends_in_part(request), hint=hint)
        hits += found
        stored += min(len(request.hash_ids), capacity) - found
    seconds = perf_counter() - began
    return Replayed(hits, trace.num_blocks, hits + stored + run.num_evicted, seconds)
