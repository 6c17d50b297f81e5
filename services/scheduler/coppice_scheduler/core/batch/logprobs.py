"""Log-probabilities of a result, to the requests that want them."""

from __future__ import annotations

from dataclasses import replace

from coppice.messages.step import StepResult, TokenLogprobs
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.workers import Worker

FLOAT_BYTES = 4


def take_logprobs(worker: Worker, result: StepResult, stopped: frozenset[int]) -> list[RequestState]:
    """Keep what is new for each request, and say which have something new. `stopped`: sequences that this result ends
    with a stop token, whose entry counts; tokens that were computed beyond an end have none."""
    found = []
    for reported in result.logprobs:
        sequence = worker.running.get(reported.sequence_id)
        if sequence is None or not sequence.request.wants_logprobs:
            continue
        request = sequence.request
        end = request.num_tokens + (reported.sequence_id in stopped)
        part = part_of(reported, request.num_logprob_positions, end)
        if part is not None:
            request.fresh_logprobs.append(part)
            request.num_logprob_positions = part.first_position + len(part.chosen) // FLOAT_BYTES
            found.append(request)
    return found


def part_of(reported: TokenLogprobs, start: int, end: int) -> TokenLogprobs | None:
    """Those of positions `start` <= position < `end`; None when there are none. After a preemption the worker reports
    once more what it computes once more."""
    first = reported.first_position
    low = max(start, first) - first
    high = min(end - first, len(reported.chosen) // FLOAT_BYTES)
    if low >= high:
        return None
    row = reported.num_top * FLOAT_BYTES
    return replace(
        reported,
        first_position=first + low,
        chosen=reported.chosen[low * FLOAT_BYTES : high * FLOAT_BYTES],
        top_ids=reported.top_ids[low * row : high * row],
        top=reported.top[low * row : high * row],
    )
