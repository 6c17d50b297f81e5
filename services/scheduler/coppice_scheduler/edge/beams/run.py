"""A beam search as a call runs it: the answers of one prompt, told whole when the search is over.

open call   one place for each beam, from the start to the end; what its tenant aborts, what a drain waits for
  step, step, ...   requests of the search
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as changed

from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, code_of, failure_of, no_ending
from coppice_scheduler.edge.base.metrics import AnswerEnd, FrontDoorMetrics
from coppice_scheduler.edge.beams.search import BeamOptions, Finished
from coppice_scheduler.edge.beams.steps import BeamSteps, OutputsOf, Searched
from coppice_scheduler.edge.request_log.open_record import current_record
from coppice_scheduler.edge.text.text_stream import Delta, TextStream
from coppice_scheduler.edge.text.tokenizer import pack_tokens


@dataclass(frozen=True, slots=True)
class BeamRun:
    request: Request  # of the prompt
    options: BeamOptions
    streams: Sequence[Callable[[Callable[[], None]], TextStream]]  # one for each answer
    outputs_of: OutputsOf
    finish: Callable[[str], None]  # called with the id of the open call, when the search has ended well
    metrics: FrontDoorMetrics
    turn: Callable[[], Awaitable[None]]  # returns when it is the tenant's turn on the loop
    saw: Callable[[Output], None]  # called with what the engine says of the prompt
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # the core has it

    @property
    def num_answers(self) -> int:
        return len(self.streams)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """One of each answer. Raises ApiError."""
        code: str | None = "cancelled"
        call = self._call()
        step = changed(self.request, step_of=call.request_id, names=())
        steps = BeamSteps(step, self.options, self.outputs_of, self.turn)
        try:
            searched = await self._while_open(call, steps.run(self.num_answers, self._began))
            deltas = self._told(searched, steps.num_tokens)
            code = None
        except BaseException as error:
            code = code_of(error)
            raise
        finally:
            if code is not None:
                self.metrics.failed(self.request.tenant, code, steps.num_tokens)
        for delta in deltas:
            yield delta

    def _call(self) -> Request:
        return changed(
            self.request,
            request_id=f"{self.request.request_id}.call",
            tokens=b"",
            num_places=self.options.width,
            streams=False,
        )

    async def _while_open(self, call: Request, search: Coroutine[None, None, Searched]) -> Searched:
        """Raises ApiError: the call's own where it was refused or ended, since its steps only fail by it."""
        opened, searched = asyncio.create_task(self._ending_of(call)), asyncio.create_task(search)
        try:
            await asyncio.wait((opened, searched), return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                raise opened.result()
            found = searched.result()
            self.finish(call.request_id)
            return found
        finally:
            opened.cancel()
            searched.cancel()
            await asyncio.gather(opened, searched, return_exceptions=True)

    async def _ending_of(self, call: Request) -> ApiError:
        """Returns when the call was ended by others."""
        try:
            async with aclosing(self.outputs_of(call)) as outputs:
                async for output in outputs:
                    return failure_of(output) or no_ending()
            return no_ending()
        except ApiError as refused:
            return refused

    def _began(self, first: Output) -> None:
        self.taken.set()
        now_ns = time.monotonic_ns()
        record = current_record()
        record.had_first_token(now_ns)
        waited_s = (now_ns - self.request.arrived_ns) / 1e9
        self.metrics.first_token(self.request.tenant, waited_s, first.num_prompt_tokens)
        self.metrics.lived(self.request.tenant, record.stages_of(first, now_ns))
        self.saw(first)

    def _told(self, searched: Searched, num_tokens: int) -> list[Delta]:
        """All that was sampled counts: what is in no answer is charged with the first."""
        deltas = [self._delta(place, answer, searched.first) for place, answer in enumerate(searched.answers)]
        if len(deltas) < self.num_answers:
            message = f"The search found {len(deltas)} answers; {self.num_answers} were asked for."
            raise ApiError(ErrorKind.INVALID, message, param="n")
        ending = deltas[0].ending
        assert ending is not None, "answers are whole"
        told = sum(delta.ending.usage.completion_tokens for delta in deltas if delta.ending is not None)
        more = max(0, num_tokens - told)
        usage = replace(ending.usage, completion_tokens=ending.usage.completion_tokens + more)
        deltas[0] = replace(deltas[0], ending=replace(ending, usage=usage))
        whole_s = (time.monotonic_ns() - self.request.arrived_ns) / 1e9
        for delta in deltas:
            assert delta.ending is not None, "answers are whole"
            usage = delta.ending.usage
            end = AnswerEnd(
                whole_s=whole_s,
                first_s=0.0,
                reason=delta.ending.reason,
                num_prompt_tokens=searched.first.num_prompt_tokens,
                num_cached_tokens=usage.cached_tokens,
                num_output_tokens=usage.completion_tokens,
            )
            self.metrics.finished(self.request.tenant, end)
        return deltas

    def _delta(self, place: int, answer: Finished, first: Output) -> Delta:
        num_tokens = len(answer.tokens) // 4 + (answer.stop_token is not None)
        delta = self.streams[place](lambda: None).take(
            Output(
                self.request.request_id,
                answer.tokens,
                finish=Finish.LENGTH if answer.stop_token is None else Finish.STOP,
                num_prompt_tokens=first.num_prompt_tokens,
                num_cached_tokens=first.num_cached_tokens,
                num_output_tokens=num_tokens,
                stop_token=b"" if answer.stop_token is None else pack_tokens([answer.stop_token]),
                num_written_tokens=first.num_written_tokens,
            )
        )
        assert delta is not None, "the last output has a delta"
        return delta
