"""What the cache would find for those who wait: asked for while a line has a choice, so that it can put matches first.

Each line asks for the first of its requests, has one question open at a time, and asks again when the answers are old.
What a line asks depends on nobody else's. Nothing is reserved by it: a hint is worth what it is worth when it is used.
"""

from __future__ import annotations

from collections import deque

from coppice.ids import CacheEpoch, DomainId, Namespace
from coppice.messages.index import MatchHints, MatchQueries, MatchQuery
from coppice_scheduler.core.queues import WaitingQueue
from coppice_scheduler.core.sequences import RequestState, RequestStatus

REFRESH_NS = 500_000_000
QUERY_BYTES_MAX = 256 * 1024  # tokens of one question, but for its first prompt
_LineKey = tuple[int, DomainId]


class Hints:
    def __init__(self, window: int) -> None:
        self._window = window
        self._open: deque[tuple[_LineKey, list[RequestState]]] = deque()  # questions without an answer, in order

    def forget(self) -> None:
        """The link started over: what is open will not be answered."""
        self._open.clear()

    def questions(self, queue: WaitingQueue, namespace: Namespace, now_ns: int) -> list[MatchQueries]:
        """For each line with a choice, and with no question open, about those that nobody looked up of late."""
        if not self._window:
            return []
        asking = {key for key, _ in self._open}
        found = []
        for number, domain, line in queue.lines():
            key = number, domain
            if key in asking:
                continue
            first = line.first(self._window)
            requests = _that_fit([request for request in first if _is_stale(request, now_ns)])
            if len(first) < 2 or not requests:
                continue
            for request in requests:
                request.matched_ns = now_ns
            self._open.append((key, requests))
            found.append(MatchQueries(tuple(MatchQuery(domain, namespace, bytes(r.tokens)) for r in requests)))
        return found

    def take(self, message: MatchHints, queue: WaitingQueue, cache_epoch: CacheEpoch) -> None:
        if message.cache_epoch != cache_epoch or not self._open:
            return
        _, requests = self._open.popleft()
        for request, hint in zip(requests, message.hints, strict=False):
            num_matched = min(max(hint.num_cached_tokens, default=0), request.num_tokens - 1)
            if num_matched != request.num_matched:
                request.num_matched = num_matched
                if request.status is RequestStatus.WAITING:
                    queue.place(request)


def _is_stale(request: RequestState, now_ns: int) -> bool:
    return request.matched_ns is None or now_ns - request.matched_ns >= REFRESH_NS


def _that_fit(requests: list[RequestState]) -> list[RequestState]:
    """The first of them always."""
    num_bytes = 0
    for count, request in enumerate(requests):
        num_bytes += len(request.tokens)
        if count and num_bytes > QUERY_BYTES_MAX:
            return requests[:count]
    return requests
