"""How many blocks of its workers the requests at work hold, as a scheduler knows it: each once, whoever shares it.

What is cached and held by nobody counts as free, as in vLLM. Pins and what other schedulers hold are not seen here.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from coppice.handles import block_ids
from coppice.ids import WorkerId
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.request import PoolUse

_HOLDING = (LeaseState.LIVE, LeaseState.RELEASING)


def pool_use(life: Lifecycle) -> PoolUse:
    """Over the workers that it plans for. A thousand leases of a hundred blocks take a millisecond or two."""
    handles: defaultdict[WorkerId, list[bytes | bytearray]] = defaultdict(list)
    for lease in life.leases.leases.values():
        if lease.state in _HOLDING:
            handles[lease.worker_id] += (lease.shared, lease.owned)
    num_blocks = num_used = block_size = 0
    for worker in life.workers.values():
        info = worker.info
        if info is None or not info.is_owned:
            continue
        is_used = np.zeros(info.num_blocks, dtype=np.bool_)
        ids = block_ids(b"".join(handles[worker.worker_id]))
        is_used[ids[ids < info.num_blocks]] = True
        num_blocks += info.num_blocks
        num_used += int(np.count_nonzero(is_used))
        block_size = max(block_size, info.block_size)
    return PoolUse(num_blocks, num_used, block_size)
