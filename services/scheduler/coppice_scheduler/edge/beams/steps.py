"""Runs a beam search on the engine: each step, every beam is a request for one token with its likeliest alternatives.

What the beams have in common is found in the cache: they share its whole blocks, and compute the rest of the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from coppice.messages.reuse import Reuse
from coppice_scheduler.core.state.request import Output, Request
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, failure_of, no_ending
from coppice_scheduler.edge.beams.search import Beam, BeamOptions, BeamSearch, Finished, Likely

OutputsOf = Callable[[Request], AsyncGenerator[Output, None]]


@dataclass(frozen=True, slots=True)
class Searched:
    """`answers`: best first. `first`: what the engine said of the prompt."""

    answers: list[Finished]
    first: Output


class BeamSteps:
    """One search. `num_tokens`: sampled for it so far."""

    def __init__(
        self, request: Request, options: BeamOptions, outputs_of: OutputsOf, turn: Callable[[], Awaitable[None]]
    ) -> None:
        """`request`: the prompt. `turn`: returns when the search may use the loop for a step."""
        self._search = BeamSearch(options)
        sampling = replace(request.sampling, temperature=0.0, num_logprobs=options.num_likely)
        # What a step leaves comes again with the next one, whatever the client says of the prompt.
        step = replace(request, reuse=Reuse.LIKELY, call_kind=0, call_opens=None, max_new_tokens=1, streams=False)
        self._prompt = replace(step, sampling=sampling, stop_token_ids=frozenset())
        self._outputs_of = outputs_of
        self._turn = turn
        self.num_tokens = 0

    async def run(self, num_answers: int, began: Callable[[Output], None]) -> Searched:
        """`began`: called with the first step's output. Raises ApiError; cancels what runs."""
        first = None
        while not self._search.is_done:
            await self._turn()
            outputs = await self._all([self._step(place, beam) for place, beam in enumerate(self._search.beams)])
            self.num_tokens += len(outputs)
            if first is None:
                first = outputs[0]
                began(first)
            self._search.take([_likely_of(output) for output in outputs])
        assert first is not None, "a search has a step"
        return Searched(self._search.best(num_answers), first)

    def _step(self, place: int, beam: Beam) -> Request:
        if not self.num_tokens:
            return self._prompt
        return replace(
            self._prompt,
            request_id=f"{self._prompt.request_id}.{self.num_tokens + place}",
            tokens=self._prompt.tokens + beam.tokens,
            # One with the first, as far as limits per minute are concerned: its prompt was counted.
            fork_of=self._prompt.request_id,
        )

    async def _all(self, steps: list[Request]) -> list[Output]:
        """The last output of each. The first failure ends all."""
        tasks = [asyncio.create_task(self._last(step)) for step in steps]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, step: Request) -> Output:
        async with aclosing(self._outputs_of(step)) as outputs:
            async for output in outputs:
                failure = failure_of(output)
                if failure is not None:
                    raise failure
                if output.finish is not None:
                    return output
        raise no_ending()


def _likely_of(output: Output) -> Likely:
    if not output.logprobs:
        raise ApiError(ErrorKind.INTERNAL, "The engine reported no log-probabilities of a beam.", code="no_logprobs")
    return Likely.of(output.logprobs[0])
