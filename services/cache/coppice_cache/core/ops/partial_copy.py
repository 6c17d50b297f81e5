"""A copy source in a grant: the block that agrees with the rest of the prompt in part.

The lease pins its node a second time, until it publishes past the block or ends: by then the step that copied it has
completed, or never will.
"""

from __future__ import annotations

from msgspec.structs import replace

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Acquire, Grant
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.radix.partial_match import PartialMatch
from coppice_cache.core.radix.tree import MatchPosition
from coppice_cache.core.state.workers import Worker

LEAST_SHARE = 8  # of a block: with less in common, such as what every prompt begins with, a copy is not worth its pin


def find_copy(worker: Worker, account: Account, op: Acquire, position: MatchPosition) -> PartialMatch | None:
    if not op.wants_copy or op.skip_match or account.config.mode is Mode.DISABLED:
        return None
    return source_of(worker, op.tokens, position)


def source_of(worker: Worker, tokens: bytes, position: MatchPosition) -> PartialMatch | None:
    """The best source for the first block after the match. The last token is computed, never copied."""
    start = position.num_blocks * worker.block_bytes
    rest = tokens[start : min(start + worker.block_bytes, len(tokens) - TOKEN_BYTES)]
    found = worker.child_orders.find(position, rest, worker.block_bytes) if rest else None
    return found if found is not None and found.num_tokens * LEAST_SHARE >= worker.block_size else None


def blocks_newly_protected(position: MatchPosition, partial: PartialMatch | None) -> int:
    """By the second pin, beside those on the path to `position`."""
    if partial is None or partial.node.guards:
        return 0
    return partial.node.num_blocks - (position.blocks_into if partial.node is position.node else 0)


def with_copy(worker: Worker, grant: Grant, partial: PartialMatch | None) -> Grant:
    """After the match was settled, the source is the first block of its node."""
    if partial is None:
        return grant
    source = partial.node.handles[:HANDLE_BYTES]
    seal = worker.ledger.seals_of(source)
    return replace(grant, copy_source=source, copy_seal=seal, num_copy_tokens=partial.num_tokens)
