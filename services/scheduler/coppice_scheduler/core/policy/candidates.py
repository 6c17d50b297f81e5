"""Which of many workers an Acquire names: few, and the same ones for prompts that begin alike.

The cache service looks at each candidate, and who asks holds a place on each until it is answered, so the cost of a
request and the number of those that may ask at once depend on how many are named. With few workers all are. With many,
rendezvous hashing orders them by the tenant's domain and the beginning of the prompt: what begins alike is computed
where it is cached, and where these workers are full the next ones of the same order take it. Who was refused by few
asks all.
"""

from __future__ import annotations

import heapq
from zlib import crc32

from coppice.ids import TOKEN_BYTES
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.workers import Worker

CANDIDATES_MAX = 16
BEGINNING_BYTES = 64 * TOKEN_BYTES  # what is lost where a shorter prompt goes elsewhere is little
_SPREAD = 2_654_435_761  # odd, near 2 ** 32 over the golden ratio: what differs in few bits is far apart behind it


def few_of(workers: list[Worker], request: RequestState) -> list[Worker]:
    """Those that its Acquire names, in the order in which they were given."""
    if len(workers) <= CANDIDATES_MAX or request.asked_under:
        return workers
    beginning = crc32(request.request.tokens[:BEGINNING_BYTES], crc32(request.request.domain.encode()))
    scores = {worker.worker_id: _score(worker.worker_id, beginning) for worker in workers}
    chosen = heapq.nlargest(CANDIDATES_MAX, scores, key=lambda worker_id: scores[worker_id])
    return [worker for worker in workers if worker.worker_id in chosen]


def _score(worker_id: str, beginning: int) -> int:
    return crc32(worker_id.encode(), beginning) * _SPREAD & 0xFFFF_FFFF
