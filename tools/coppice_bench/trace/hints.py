"""Hints of clients that are right in a stated share of the cases, each by itself.

A prompt comes again if a later one begins with all its full blocks. Of a prompt without a full block nothing is said.
"""

from __future__ import annotations

from random import Random

from coppice.messages.reuse import Reuse
from coppice_bench.trace.file import Trace


def comes_again(trace: Trace) -> list[bool | None]:
    """Whether the prompt of each request does; None: it has no full block."""
    later: set[int] = set()  # equal ids mean equal prompts up to there
    found: list[bool | None] = []
    for request in reversed(trace.requests):
        count = len(request.hash_ids) - trace.ends_in_part(request)
        found.append(request.hash_ids[count - 1] in later if count else None)
        later.update(request.hash_ids)
    return found[::-1]


def hints(trace: Trace, accuracy: float, seed: int) -> list[Reuse]:
    """One for each request, right with this probability: at 0.5 they tell nothing."""
    random = Random(seed)
    return [_said(truth, is_right=random.random() < accuracy) for truth in comes_again(trace)]


def _said(truth: bool | None, *, is_right: bool) -> Reuse:
    if truth is None:
        return Reuse.UNKNOWN
    return Reuse.LIKELY if truth == is_right else Reuse.UNLIKELY
