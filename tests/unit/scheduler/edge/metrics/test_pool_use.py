"""How much of its workers' pools a scheduler says is used."""

from __future__ import annotations

import numpy as np

from coppice_scheduler.core.state.request import PoolUse
from tests.fakes.trio import Trio

BLOCKS, BLOCK = 64, 4


def tokens(start: int, count: int) -> bytes:
    return np.arange(start, start + count, dtype="<u4").tobytes()


def test_blocks_of_requests_at_work_count_once_and_cached_ones_do_not() -> None:
    trio = Trio(num_blocks=BLOCKS, block_size=BLOCK, max_context=256)
    assert trio.scheduler.pool_use() == PoolUse(BLOCKS, 0, BLOCK)
    trio.serve(tokens(0, 40), 2)
    assert trio.index.stats().cached_blocks
    assert trio.scheduler.pool_use() == PoolUse(BLOCKS, 0, BLOCK)
    for number in range(3):  # they share 10 blocks
        trio.submit(f"r{number}", tokens(0, 40) + tokens(100 * number, 5), 12)
    seen = []
    while not trio.scheduler.is_idle():
        trio.turn()
        stats, use = trio.index.stats(), trio.scheduler.pool_use()
        # What is leased has no place in a tree yet; of what has one, some is held.
        assert stats.leased_blocks <= use.num_used_blocks <= stats.leased_blocks + stats.cached_blocks
        seen.append(use.num_used_blocks)
    assert seen[0] == 10 + 3 * 2, "each shared block counts once"
    assert max(seen) == 10 + 3 * 4
    assert seen[-1] == 0
