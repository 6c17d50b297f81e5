"""What came of all requests of one prompt, as the user gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coppice_offline.answers.request_stream import RequestStream
from coppice_offline.interface.results import Completion, Generation
from coppice_offline.prompts import Read
from coppice_scheduler.edge.text.tokenizer import unpack_tokens


def generation_of(prompt: Read, group: Sequence[RequestStream], num_told: int) -> Generation:
    """After the last output of each. Of more candidates than are told, those with the best scores, best first."""
    wants_prompt = group[0].request.sampling.num_prompt_logprobs is not None
    candidates = [stream.completion() for stream in group]
    return Generation(
        prompt=prompt.text,
        prompt_token_ids=unpack_tokens(prompt.tokens),
        outputs=tuple(candidates if len(candidates) == num_told else _best(candidates, num_told)),
        prompt_logprobs=group[0].prompt_logprobs() if wants_prompt else None,
    )


def _best(candidates: Sequence[Completion], count: int) -> list[Completion]:
    """Of candidates that are alike the earlier one is better. What was cached of the prompt the first one found."""
    num_cached = candidates[0].usage.cached_tokens
    return [
        replace(best, index=place, usage=replace(best.usage, cached_tokens=num_cached) if not place else best.usage)
        for place, best in enumerate(sorted(candidates, key=_badness)[:count])
    ]


def _badness(candidate: Completion) -> float:
    assert candidate.score is not None, "candidates have scores"
    return -candidate.score
