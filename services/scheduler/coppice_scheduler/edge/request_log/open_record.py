"""The record of a call while it lasts, filled by whoever learns of something, and written once.

    first byte --> key --> opened --> first token, stages --> usage is known --> written --> the client is told
               \\-> refused, or answered without a model: written when the answer begins

So each usage that a client was told has been written before, whatever dies meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol

from coppice.request_log.record import RequestRecord, life_of, ms
from coppice.request_log.stages import Stage, StageKind
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import Output
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Usage

_CLOCK_SLACK_NS = 1_000_000_000


class Log(Protocol):
    def write(self, record: RequestRecord) -> None:
        """Never raises."""
        ...


class OpenRecord:
    def __init__(self, log: Log | None, api: str, request_id: str, client: str = "") -> None:
        """Without a log nothing is written."""
        self._log = log
        self._api = api
        self._id = request_id
        self._client = client
        self._arrived_ns = time.monotonic_ns()
        self._tenant: Tenant | None = None
        self._call = self._model = self._trace = self._end = ""
        self._streams = False
        self._usage: Usage | None = None
        self._cut_off = NO_USAGE
        self._num_answers = 0
        self._first_token_ns = 0
        self._moved_ns: list[int] = []
        self._last: Output | None = None

    def called_by(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def opened(self, call_id: str, model: str, *, streams: bool, trace: str) -> None:
        """It is a call of a model; its end is told by `ended`."""
        self._call, self._model, self._streams, self._trace = call_id, model, streams, trace

    def had_first_token(self, at_ns: int) -> None:
        """Of all its answers the earliest counts."""
        self._first_token_ns = min(self._first_token_ns or at_ns, at_ns)

    def waited_ns(self, since_ns: int) -> int:
        """To the first token, or till now."""
        return (self._first_token_ns or time.monotonic_ns()) - since_ns

    def traced(self, trace: str) -> None:
        """It got a trace after all."""
        self._trace = trace

    def moved(self) -> None:
        """Its planner was lost; another one goes on."""
        self._moved_ns.append(time.monotonic_ns())

    def life(self, last: Output) -> None:
        """The last output of one of its answers."""
        self._last = last

    def was_cut_off(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One of its answers did not come to its end: what it had generated was used all the same."""
        if num_output_tokens:
            self._cut_off += Usage(num_prompt_tokens, num_output_tokens, 0)

    def failed(self, code: str) -> None:
        """Why it is refused or fails."""
        self._end = code

    def ended(self, usage: Usage, reasons: Sequence[str], error: str | None, status: int) -> None:
        """What the client is about to be told. Writes."""
        self._usage, self._num_answers = usage + self._cut_off, len(reasons)
        self._end = error or ",".join(sorted(set(reasons)))
        self.close(status)

    def close(self, status: int) -> None:
        """Writes what is known, unless it was written."""
        log, self._log = self._log, None
        if log is None:
            return
        log.write(self._record(status))

    def _record(self, status: int) -> RequestRecord:
        now_ns, tenant, usage = time.monotonic_ns(), self._tenant, self._usage
        life = life_of(() if self._last is None else self.stages_of(self._last, now_ns), self._arrived_ns)
        keys = () if tenant is None else tenant.api_key_sha256
        chunks = () if self._last is None else self._last.chunks
        shift_ns = (0 if self._last is None else self._shift_ns(self._last, now_ns)) - self._arrived_ns
        return RequestRecord(
            at=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            id=self._id,
            api=self._api,
            status=status,
            end=self._end or ("ok" if status < 400 else str(status)),
            call=self._call,
            tenant="" if tenant is None else tenant.id,
            key=(keys[0].name or "") if len(keys) == 1 else "",
            model=self._model,
            client=self._client,
            streams=self._streams,
            num_answers=self._num_answers,
            tokens_in=0 if usage is None else usage.prompt_tokens,
            tokens_cached=0 if usage is None else usage.cached_tokens,
            tokens_written=0 if usage is None else usage.written_tokens,
            tokens_out=0 if usage is None else usage.completion_tokens,
            queue_ms=life.queue_ms,
            ttft_ms=ms(self._first_token_ns - self._arrived_ns) if self._first_token_ns else 0.0,
            total_ms=ms(now_ns - self._arrived_ns),
            moves=len(self._moved_ns),
            trace=self._trace,
            cause=life.cause,
            blocker=life.blocker,
            stages=life.stages,
            chunks=tuple((ms(start + shift_ns), ms(end + shift_ns), count) for start, end, count in chunks),
        )

    def stages_of(self, last: Output, now_ns: int) -> list[Stage]:
        """From its arrival until now, on this machine's clock, of the answer whose last output this is. What a lost
        planner knew of it is lost with it."""
        if not last.stages:
            return []
        shift_ns = self._shift_ns(last, now_ns)
        found = last.stages
        if shift_ns:
            found = tuple(
                Stage(stage.kind, stage.start_ns + shift_ns, stage.end_ns + shift_ns, stage.blocker, stage.amount)
                for stage in found
            )
        if self._moved_ns:
            begun_ns = found[0].start_ns
            lost_ns = min(max(self._moved_ns[-1], self._arrived_ns), begun_ns)
            before = [
                Stage(StageKind.OMITTED, self._arrived_ns, lost_ns),
                Stage(StageKind.MOVED, lost_ns, begun_ns),
            ]
        else:
            before = [Stage(StageKind.FRONT_DOOR, self._arrived_ns, found[0].start_ns)]
        after = Stage(StageKind.FRONT_DOOR, found[-1].end_ns, now_ns)
        return [*(stage for stage in before if stage.length_ns > 0), *found, *([after] if after.length_ns > 0 else [])]

    def _shift_ns(self, last: Output, now_ns: int) -> int:
        """From the planner's clock to ours: on another machine it has begun at another time."""
        if not last.stages:
            return 0
        start_ns, end_ns = last.stages[0].start_ns, last.stages[-1].end_ns
        is_ours = self._arrived_ns - _CLOCK_SLACK_NS <= start_ns and end_ns <= now_ns + _CLOCK_SLACK_NS
        return 0 if is_ours else now_ns - end_ns


_CURRENT: ContextVar[OpenRecord | None] = ContextVar("open_record", default=None)


def begin(record: OpenRecord) -> OpenRecord:
    """From now on the present task serves this call; each call is a task of its own."""
    _CURRENT.set(record)
    return record


def current_record() -> OpenRecord:
    """Of the call that the present task serves; one that is written nowhere outside of calls."""
    return _CURRENT.get() or OpenRecord(None, "", "")
