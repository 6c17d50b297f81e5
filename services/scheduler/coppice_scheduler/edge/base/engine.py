"""The seam between the front door and the planner: requests go in, tokens come out.

    front door --generate(request)--> Output, Output, ... Output(finish)
               --finish(id)---------> (a stop string was found)         ends with Finish.STOP
               --aclose()-----------> (the client went away)            nothing more comes
               --abort(names)-------> (its tenant wants no more of it)  ends with Finish.ERROR
    front door --generate(call)-----> nothing, or Output(finish): an open call, whose steps are requests of their own

The front door knows text, the engine knows tokens. `tests/fakes/api/engine.py` is the stand-in for tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from coppice.messages.record import Record
from coppice_scheduler.core.state.request import Output, OutputError, Refused, Request, SchedulerStats
from coppice_scheduler.edge.base.idempotency import Claimed, FirstOutcome

OUTAGE_S = 15.0  # a part that is gone for so long is not merely restarting: clients are told to go elsewhere


class ModelInfo(Record, frozen=True):
    """The model behind an engine, as `/v1/models` tells it."""

    id: str
    max_context: int  # tokens of one sequence, prompt and output together
    created: int  # seconds since 1970
    vocab_size: int = 0  # token ids at or above it are refused; 0 = take the tokenizer's


class RequestRefused(Exception):
    """The core refused the request; nothing was reserved for it."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class EngineLost(Exception):
    """The planner is gone, or about to be: nobody knows what is at work."""

    def __init__(self, error: OutputError) -> None:
        super().__init__(error.message)
        self.error = error


class Engine(Protocol):
    """What the front door needs of a planner."""

    @property
    def ready(self) -> bool:
        """Whether requests can be served now: a worker and the cache service are there, nothing drains."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether new requests are taken: when it is ready, and through a short outage, in which they wait."""
        ...

    @property
    def model(self) -> ModelInfo: ...

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Tokens of one request, the last Output has `finish`. Closing the generator cancels the request.

        Raises RequestRefused on the first iteration. Of a request that `streams`, an Output without tokens may come
        first: the request was taken, and waits. The caller may read slowly: what has not been read is joined into
        one Output, so that what waits for a reader is bounded by the request's own length.
        """
        ...

    def finish(self, request_id: str) -> None:
        """A stop string was found: end with Finish.STOP. Unknown and finished ids are ignored."""
        ...

    def end(self, request_id: str, error: OutputError) -> None:
        """End with this error. Unknown and finished ids are ignored."""
        ...

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
        """Whether a call with this `Idempotency-Key` computes, or the first one's outcome, once it is there.

        Whichever front door that came by. After MINE, `settle` must follow. Not to be cancelled. Raises EngineLost.
        """
        ...

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        """How the call ended whose claim of this number was MINE. None: nobody is to be told."""
        ...

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        """End all requests of this tenant that have one of these names with an error that says so; their number.

        Whichever front door they came by. Raises EngineLost.
        """
        ...

    @property
    def tenants_refused(self) -> bool:
        """Whether a newer tenants file than the one that counts is wrong."""
        ...

    def stats(self) -> SchedulerStats: ...


NO_STATS = SchedulerStats(0, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # of a planner that has said nothing yet
