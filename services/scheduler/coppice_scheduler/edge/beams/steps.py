"""Runs a beam search on the engine: each step, every beam is a request for one token with its likeliest alternatives.

What the beams have in common is found in the cache: they share its whole blocks, and compute the rest of the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, from_output
from coppice_scheduler.edge.beams.search import BeamOptions, BeamSearch, Finished, Likely
from coppice_scheduler.edge.text.logprobs import LEAST_LOGPROB, unpack_logprobs

OutputsOf = Callable[[Request], AsyncGenerator[Output, None]]


@dataclass(frozen=True, slots=True)
class Searched:
    """`answers`: best first. `first`: what the engine said of the prompt. `num_tokens`: sampled for all of it."""

    answers: list[Finished]
    first: Output
    num_tokens: int


async def search(
    request: Request, options: BeamOptions, num_answers: int, outputs_of: OutputsOf, began: Callable[[Output], None]
) -> Searched:
    """`request`: the prompt. `began`: called with the first step's output. Raises ApiError; cancels what runs."""
    found, first, num_tokens = BeamSearch(options), None, 0
    sampling = replace(request.sampling, temperature=0.0, num_logprobs=found.num_likely)
    plain = replace(request, sampling=sampling, max_new_tokens=1, stop_token_ids=frozenset(), streams=False)
    while not found.is_done:
        steps = [
            replace(
                plain,
                request_id=request.request_id if first is None else f"{request.request_id}.{num_tokens + place}",
                tokens=request.tokens + beam.tokens,
                # One with the first, as far as limits per minute are concerned: its prompt was counted.
                fork_of=None if first is None else request.request_id,
            )
            for place, beam in enumerate(found.beams)
        ]
        outputs = await _all(steps, outputs_of)
        if first is None:
            first = outputs[0]
            began(first)
        num_tokens += len(steps)
        found.take([_likely_of(output) for output in outputs])
    assert first is not None, "a search has a step"
    return Searched(found.best(num_answers), first, num_tokens)


async def _all(steps: list[Request], outputs_of: OutputsOf) -> list[Output]:
    """The last output of each. The first failure ends all."""
    tasks = [asyncio.create_task(_last(step, outputs_of)) for step in steps]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last(step: Request, outputs_of: OutputsOf) -> Output:
    async with aclosing(outputs_of(step)) as outputs:
        async for output in outputs:
            if output.finish is Finish.ERROR:
                raise from_output(output.error)
            if output.finish is Finish.CANCELLED:
                raise ApiError(ErrorKind.UNAVAILABLE, "The server cancelled the request.", code="cancelled")
            if output.finish is not None:
                return output
    raise ApiError(ErrorKind.INTERNAL, "The engine ended the request without a reason.", code="internal")


def _likely_of(output: Output) -> Likely:
    for reported in unpack_logprobs(output.logprobs, least=LEAST_LOGPROB):
        return reported.top
    raise ApiError(ErrorKind.INTERNAL, "The engine reported no log-probabilities of a beam.", code="no_logprobs")
