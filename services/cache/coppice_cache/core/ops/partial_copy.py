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


def find_copy(worker: Worker, account: Account, op: Acquire, position: MatchPosition) -> PartialMatch | None:
    """The best source for the first block after the match. The last token is computed, never copied."""
    if not op.wants_copy or op.skip_match or account.config.mode is Mode.DISABLED:
        return None
    start = position.num_blocks * worker.block_bytes
    rest = op.tokens[start : min(start + worker.block_bytes, len(op.tokens) - TOKEN_BYTES)]
    return worker.child_orders.find(position, rest, worker.block_bytes) if rest else None


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
