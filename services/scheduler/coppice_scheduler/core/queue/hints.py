"""What the cache would find for those who wait, and for requests whose front door has not chosen a planner yet.

    line of a tenant   asked for while it has a choice, so that it can put matches first
    front door         asked for once, for a request that is not here (`Lookup`)

Each line asks for the first of its requests, has one question open at a time, and asks again when the answers are old.
It is looked at when somebody joins it or leaves it and when its answers grow old, not in each turn. What a line asks
depends on nobody else's. Nothing is reserved by it: a hint is worth what it is worth when it is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coppice.ids import TOKEN_BYTES, CacheEpoch, Namespace
from coppice.messages.index import MatchHint, MatchHints, MatchQueries, MatchQuery
from coppice.namespaces import with_salt
from coppice_scheduler.core.queue.lazy_heap import LazyHeap
from coppice_scheduler.core.queue.queues import TenantQueueKey, WaitingQueue
from coppice_scheduler.core.state.request import LookedUp, Lookup
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus

REFRESH_NS = 500_000_000
QUERY_BYTES_MAX = 256 * 1024  # tokens of one question, but for its first prompt


@dataclass(frozen=True, slots=True)
class _LineQuestion:
    key: TenantQueueKey
    requests: list[RequestState]


class Hints:
    def __init__(self, window: int) -> None:
        self._window = window
        self._open: deque[_LineQuestion | Lookup] = deque()  # questions without an answer, in order
        self._asking: set[TenantQueueKey] = set()  # lines with one of these
        self._due: dict[TenantQueueKey, int] = {}  # when the others are looked at next, if somebody is in them
        self._times: LazyHeap[tuple[int, TenantQueueKey]] = LazyHeap(self._is_due)
        self._lookups: list[Lookup] = []  # not asked yet
        self._looked_up: list[LookedUp] = []  # answers on their way to the front doors

    def forget(self) -> None:
        """The link started over: what is open will not be answered."""
        self._looked_up += [LookedUp(one.number) for one in self._open if isinstance(one, Lookup)]
        self._open.clear()
        for key in sorted(self._asking):
            self._look_at(key, 0)
        self._asking.clear()

    # --- for front doors

    def look_up(self, lookup: Lookup) -> None:
        self._lookups.append(lookup)

    @property
    def has_lookups(self) -> bool:
        """Some were not asked yet."""
        return bool(self._lookups)

    def lookups(self, namespace: Namespace | None) -> list[MatchQueries]:
        """One question for each. Without a namespace nobody can be asked: nothing is known then."""
        lookups, self._lookups = self._lookups, []
        if namespace is None:
            self._looked_up += [LookedUp(lookup.number) for lookup in lookups]
            return []
        self._open.extend(lookups)
        return [MatchQueries((MatchQuery(one.domain, with_salt(namespace, one.salt), one.tokens),)) for one in lookups]

    def take_looked_up(self) -> tuple[LookedUp, ...]:
        looked_up, self._looked_up = tuple(self._looked_up), []
        return looked_up

    # --- for lines

    def questions(self, queue: WaitingQueue, namespace: Namespace, now_ns: int) -> list[MatchQueries]:
        """For each line with a choice, and with no question open, about those that nobody looked up of late."""
        if not self._window:
            return []
        for key in queue.take_changed():
            if key not in self._asking:
                self._look_at(key, now_ns)
        found = []
        while (first := self._times.first()) is not None and first[0] <= now_ns:
            key = first[1]
            del self._due[key]
            requests = self._worth_asking(queue, key, now_ns)
            if requests:
                self._open.append(_LineQuestion(key, requests))
                self._asking.add(key)
                named = [(with_salt(namespace, r.request.salt), r.all_tokens()) for r in requests]
                found.append(MatchQueries(tuple(MatchQuery(key[1], name, tokens) for name, tokens in named)))
        return found

    def _worth_asking(self, queue: WaitingQueue, key: TenantQueueKey, now_ns: int) -> list[RequestState]:
        """About whom this line asks now; whoever it asks about counts as looked up."""
        line = queue.line(key)
        first = line.first(self._window) if line is not None else []
        if len(first) < 2:
            return []
        requests = _that_fit([request for request in first if _is_stale(request, now_ns)])
        for request in requests:
            request.matched_ns = now_ns
        if not requests:
            self._look_at(key, min(request.matched_ns or now_ns for request in first) + REFRESH_NS)
        return requests

    def _look_at(self, key: TenantQueueKey, at_ns: int) -> None:
        if at_ns < self._due.get(key, at_ns + 1):
            self._due[key] = at_ns
            self._times.push((at_ns, key))

    def _is_due(self, entry: tuple[int, TenantQueueKey]) -> bool:
        return self._due.get(entry[1]) == entry[0]

    # --- answers

    def take(self, message: MatchHints, queue: WaitingQueue, cache_epoch: CacheEpoch) -> None:
        if message.cache_epoch != cache_epoch or not self._open:
            return
        question = self._open.popleft()
        if isinstance(question, Lookup):
            hint = message.hints[0] if message.hints else MatchHint((), ())
            self._looked_up.append(LookedUp(question.number, hint.worker_ids, hint.num_cached_tokens))
            return
        self._asking.discard(question.key)
        self._look_at(question.key, 0)
        for request, hint in zip(question.requests, message.hints, strict=False):
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
        num_bytes += request.num_tokens * TOKEN_BYTES
        if count and num_bytes > QUERY_BYTES_MAX:
            return requests[:count]
    return requests
