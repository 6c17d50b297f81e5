"""Calls at work: every answer of a call is one run, all runs at once, their deltas joined as they come.

Where the best of several candidates are asked for, they are told when all have ended. A refusal or failure of one run
ends the call; closing `Call.deltas()` cancels what runs. So may another call of the tenant, which may have come by
another front door: the planner ends it as it ends a failure (`abort_calls`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import ClassVar

from opentelemetry import trace

from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import Output, Request
from coppice_scheduler.edge.base.engine import Engine, EngineLost, RequestRefused
from coppice_scheduler.edge.base.errors import (
    code_of,
    from_output,
    from_refused,
    no_ending,
    request_not_found,
)
from coppice_scheduler.edge.base.metrics import AnswerEnd, FrontDoorMetrics
from coppice_scheduler.edge.base.request_id import names_meant
from coppice_scheduler.edge.beams.run import BeamRun
from coppice_scheduler.edge.frontend.admission import Admitted
from coppice_scheduler.edge.frontend.calls_by_key import CallsByKey
from coppice_scheduler.edge.frontend.loop_share import LoopShare
from coppice_scheduler.edge.frontend.tracing import CallSpan
from coppice_scheduler.edge.request_log.open_record import OpenRecord
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Delta, Ending, TextStream, Usage

_MERGED_DELTAS_MAX = 64  # waiting for a slow reader of several answers; then the answers wait


@dataclass(frozen=True, slots=True)
class Call:
    """One admitted call. Iterate `deltas()` once, inside `aclosing`; until then nothing runs."""

    call_id: str
    prompts: tuple[Admitted, ...]
    num_choices: int  # of each prompt; answer i belongs to prompt i // num_choices
    num_candidates: int  # of each prompt, of which the best are its choices; as many run
    shows_cached_tokens: bool  # to the client; spans have them in any case
    _runs: tuple[Run | BeamRun, ...]
    _span: CallSpan

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(prompt.num_prompt_tokens for prompt in self.prompts)

    @property
    def unique_id(self) -> str:
        """Without the prefix that OpenAI's ids have."""
        return self.call_id.partition("-")[2]

    async def taken(self) -> None:
        """Returns when the core has taken all of it. Not before where it refuses, and only while `deltas` is read."""
        for run in self._runs:
            await run.taken.wait()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Text as it comes, of all answers. Raises ApiError, on the first iteration when the core refuses."""
        usage, reasons = NO_USAGE, []
        error: BaseException | None = None
        try:
            async with aclosing(self._answers()) as answers:
                async for delta in answers:
                    if delta.ending is not None:
                        usage += delta.ending.usage
                        reasons.append(delta.ending.reason)
                    yield delta if self.shows_cached_tokens else _without_cached_tokens(delta)
        except BaseException as raised:  # GeneratorExit, where the caller closed it
            error = raised
            raise
        finally:
            self._span.end(usage, reasons, error)

    def _answers(self) -> AsyncGenerator[Delta, None]:
        merged = _merge(self._runs)
        if self.num_candidates == self.num_choices:
            return merged
        return _best_of(merged, self.num_candidates, self.num_choices)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of a call."""

    engine: Engine
    metrics: FrontDoorMetrics
    request: Request
    span: CallSpan
    make_stream: Callable[[Callable[[], None]], TextStream]
    calls: CallsByKey
    tenant: Tenant
    loop_share: LoopShare
    units: int  # of the loop's time, that it takes to begin
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # the core has it
    num_answers: ClassVar[int] = 1

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        num_tokens, text_ns = 0, 0
        code: str | None = "cancelled"
        try:
            await self.loop_share.take(self.tenant.id, self.units)
            stream = self.make_stream(lambda: self.engine.finish(self.request.request_id))
            clock = _Clock(self.metrics, self.request, self.span.record)
            ours = outputs_of(self.request, self.engine, self.calls, self.tenant, self.span)
            async with aclosing(ours) as outputs:
                async for output in outputs:
                    self.taken.set()
                    clock.saw(output)
                    if output.finish is not None:
                        self.span.life(output)
                    began_ns = time.monotonic_ns()
                    try:
                        delta = stream.take(output)
                    finally:
                        now_ns = time.monotonic_ns()
                        text_ns += now_ns - began_ns
                        if output.finish is not None:
                            self.metrics.lived(self.request.tenant, self.span.record.stages_of(output, now_ns))
                    num_tokens = stream.num_tokens
                    if delta is not None and delta.ending is not None:
                        clock.finished(delta.ending.reason, delta.ending.usage, output)
                        code = None
                        yield delta
                        return
                    if delta is not None:
                        yield delta
            raise no_ending()
        except BaseException as error:
            code = code_of(error) if code is not None else None
            raise
        finally:
            self.span.made_text(text_ns)
            if code is not None:
                self.metrics.failed(self.request.tenant, code, num_tokens)
                num_prompt = 0 if self.request.fork_of is not None else len(self.request.tokens) // 4
                self.span.record.was_cut_off(num_prompt, num_tokens)


async def outputs_of(
    request: Request, engine: Engine, calls: CallsByKey, tenant: Tenant, span: CallSpan
) -> AsyncGenerator[Output, None]:
    """The engine's outputs. The first step runs under the call's span, so that the engine can carry it on.

    Raises ApiError where the engine refuses.
    """
    with calls.at_work(request.request_id, tenant):
        async with aclosing(engine.generate(request)) as outputs:
            try:
                with trace.use_span(span.span, record_exception=False, set_status_on_exception=False):
                    first = await anext(outputs)
            except RequestRefused as error:
                raise from_refused(error.refused) from error
            except StopAsyncIteration:
                return
            yield first
            async for output in outputs:
                yield output


class _Clock:
    """Latencies of one answer."""

    def __init__(self, metrics: FrontDoorMetrics, request: Request, record: OpenRecord) -> None:
        self._metrics = metrics
        self._record = record
        self._request = request
        self._last_ns = 0
        self.first_ns = 0  # when the first token was there

    def saw(self, output: Output) -> None:
        now_ns = time.monotonic_ns()
        num_tokens = len(output.tokens) // 4
        if not num_tokens and not output.stop_token:
            return
        if not self._last_ns:
            # Where all tokens come at once, the engine says when the first one was there.
            at_once = not self._request.streams
            ends = [end_ns for _, end_ns, _ in output.chunks] if at_once else []
            said_ns = max(ends, default=now_ns)
            # A planner on another machine has another clock.
            is_ours = self._request.arrived_ns <= said_ns <= now_ns
            self._last_ns = self.first_ns = said_ns if is_ours else now_ns
            self._record.had_first_token(self.first_ns)
            num_tokens -= 1
            num_prompt_tokens = 0 if self._request.fork_of is not None else len(self._request.tokens) // 4
            waited_s = (self._last_ns - self._request.arrived_ns) / 1e9
            self._metrics.first_token(self._request.tenant, waited_s, num_prompt_tokens)
            if not ends:
                return
        self._metrics.gap(self._request.tenant, (now_ns - self._last_ns) / 1e9, num_tokens)
        self._last_ns = now_ns

    def finished(self, reason: str, usage: Usage, last: Output) -> None:
        arrived_ns = self._request.arrived_ns
        end = AnswerEnd(
            whole_s=(time.monotonic_ns() - arrived_ns) / 1e9,
            first_s=(self.first_ns - arrived_ns) / 1e9 if self.first_ns else 0.0,
            reason=reason,
            num_prompt_tokens=last.num_prompt_tokens or len(self._request.tokens) // 4,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=usage.completion_tokens,
            stages=last.stages,
        )
        self._metrics.finished(self._request.tenant, end)


async def abort_calls(engine: Engine, tenant: Tenant, asked: str) -> int:
    """End all calls of the tenant whose `X-Request-Id`, or the id of whose answer, is `asked`.

    Returns how many answers ended. Raises ApiError: NOT_FOUND where the tenant has none at work.
    """
    try:
        num_answers = await engine.abort(tenant.id, names_meant(asked))
    except EngineLost as lost:
        raise from_output(lost.error) from lost
    if not num_answers:
        raise request_not_found(asked)
    return num_answers


async def _merge(runs: tuple[Run | BeamRun, ...]) -> AsyncGenerator[Delta, None]:
    """Deltas of all runs as they come. The first error ends all."""
    if len(runs) == 1:
        async with aclosing(runs[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta
        return
    arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue(_MERGED_DELTAS_MAX)
    tasks = [asyncio.create_task(_pump(run, arrived)) for run in runs]
    try:
        num_running = sum(run.num_answers for run in runs)
        while num_running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_running -= item.ending is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(run: Run | BeamRun, into: asyncio.Queue[Delta | Exception]) -> None:
    try:
        async with aclosing(run.deltas()) as deltas:
            async for delta in deltas:
                await into.put(delta)
    except Exception as error:
        await into.put(error)


async def _best_of(
    deltas: AsyncGenerator[Delta, None], num_candidates: int, num_choices: int
) -> AsyncGenerator[Delta, None]:
    """The deltas of each prompt's `num_choices` best candidates, best first, once its `num_candidates` have ended.

    The best are those whose tokens the model finds likeliest, each token counting the same.

    Candidate i belongs to prompt i // num_candidates. Everything that was computed is charged: the usage of the others
    goes to the best. Of candidates that are alike the earlier one is better.
    """
    held: dict[int, list[Delta]] = {}  # by candidate
    endings: dict[int, dict[int, Ending]] = {}  # by prompt, then by candidate
    async with aclosing(deltas):
        async for delta in deltas:
            held.setdefault(delta.index, []).append(delta)
            if delta.ending is None:
                continue
            prompt = delta.index // num_candidates
            ended = endings.setdefault(prompt, {})
            ended[delta.index] = delta.ending
            if len(ended) == num_candidates:
                for choice in _chosen(prompt, held, ended, num_choices):
                    yield choice


def _chosen(prompt: int, held: dict[int, list[Delta]], ended: dict[int, Ending], num_choices: int) -> list[Delta]:
    """Takes the prompt's candidates out of `held`."""
    order = sorted(ended, key=lambda index: (-_score(ended[index]), index))
    candidates = [held.pop(index) for index in order]
    first = min(order)  # the prompt is told and counted with it
    told_of_prompt, usage_of_first = candidates[order.index(first)][0].prompt, ended[first].usage
    lost = sum((_of_output(ended[index].usage) for index in order[num_choices:]), NO_USAGE)
    found = []
    for place, deltas in enumerate(candidates[:num_choices]):
        usage = _of_output(ended[order[place]].usage)
        if not place:
            usage = replace(usage_of_first, completion_tokens=0, reasoning_tokens=0) + usage + lost
        deltas[0] = replace(deltas[0], prompt=None if place else told_of_prompt)
        deltas[-1] = replace(deltas[-1], ending=replace(ended[order[place]], usage=usage))
        found += [replace(delta, index=prompt * num_choices + place) for delta in deltas]
    return found


def _of_output(usage: Usage) -> Usage:
    return replace(usage.without_cached_tokens(), prompt_tokens=0)


def _without_cached_tokens(delta: Delta) -> Delta:
    if delta.ending is None:
        return delta
    return replace(delta, ending=replace(delta.ending, usage=delta.ending.usage.without_cached_tokens()))


def _score(ending: Ending) -> float:
    assert ending.mean_logprob is not None, "candidates have scores"
    return ending.mean_logprob
