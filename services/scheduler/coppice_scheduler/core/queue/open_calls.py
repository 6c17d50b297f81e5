"""Calls that make their requests one after the other, such as a beam search.

    submit(num_places=4)  -> open: four places of its tenant's concurrency are its own, whether a step uses them or not
    submit(step_of=...)   -> a step, in one of these places; after the first it meets no full queue and no drain
    cancel, end           -> closed

Without it nothing of such a call would be at work between two of its steps: it could not be aborted then, a drain would
end it half-way, and what came in at the start could be refused in the middle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coppice_scheduler.core.state.counts import decrement
from coppice_scheduler.core.state.estimates import RecentRequests
from coppice_scheduler.core.state.outbox import Outbox
from coppice_scheduler.core.state.request import NOT_SERVED, Finish, OutputError, OutputErrorCode, Request
from coppice_scheduler.core.state.settings import SchedulerSettings


@dataclass(slots=True)
class OpenCall:
    request: Request
    since_ns: int
    num_steps: int = 0  # at work


class OpenCalls:
    def __init__(self, recent: RecentRequests, outbox: Outbox) -> None:
        self._recent = recent
        self._outbox = outbox
        self._calls: dict[str, OpenCall] = {}  # by request id
        self._spare: Counter[str] = Counter()  # by tenant: places that no step uses

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, request: Request, now_ns: int) -> None:
        self._calls[request.request_id] = OpenCall(request, now_ns)
        self._spare[request.tenant] += request.num_places

    def end(self, request_id: str, finish: Finish, now_ns: int, error: OutputError | None = None) -> bool:
        """Whether it was open. Its steps at work are requests as all others from now on: who made them hears of it."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return False
        decrement(self._spare, call.request.tenant, call.request.num_places - call.num_steps)
        if finish is Finish.STOP:
            self._recent.call_ended(call.request.tenant, now_ns - call.since_ns)
        self._outbox.call_ended(request_id, finish, error)
        return True

    def end_unserved(self, settings: SchedulerSettings, now_ns: int) -> None:
        """The tenants changed: calls of those that are not served any more end."""
        for request in [call.request for call in self._calls.values()]:
            if not settings.serves(request.tenant, request.domain):
                error = OutputError(OutputErrorCode.TENANT_REMOVED, NOT_SERVED)
                self.end(request.request_id, Finish.ERROR, now_ns, error)

    def find(self, request_id: str | None) -> OpenCall | None:
        return self._calls.get(request_id or "")

    def num_spare(self, tenant: str) -> int:
        """Places that the tenant's calls hold beside its requests at work."""
        return self._spare[tenant]

    def spare_places(self) -> dict[str, int]:
        """Of the tenants that have some."""
        return {tenant: count for tenant, count in self._spare.items() if count}

    def step_began(self, step: Request) -> None:
        call = self.find(step.step_of)
        if call is not None:
            call.num_steps += 1
            decrement(self._spare, step.tenant)

    def step_ended(self, step: Request) -> None:
        call = self.find(step.step_of)
        if call is not None:
            call.num_steps -= 1
            self._spare[step.tenant] += 1

    def check(self, at_work: Counter[str]) -> None:
        """Assert that the counts are those of the steps. `at_work`: requests by the call that they are a step of."""
        spare: Counter[str] = Counter()
        for request_id, call in self._calls.items():
            assert call.num_steps == at_work[request_id] <= call.request.num_places
            spare[call.request.tenant] += call.request.num_places - call.num_steps
        assert +spare == +self._spare
