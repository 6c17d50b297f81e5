"""The life of an answer as metrics sum it up: by cause, and in the three parts that vLLM's histograms know.

QUEUED NO_SLOT ACQUIRE | PREFILL SLOW_STEP PREFILL | DECODE (PREEMPTED) QUEUED PREFILL DECODE
'------- queue -------' '-------- prefill --------' '---------------- decode ---------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.request_log.stages import Stage, StageKind

_COMPUTED = (StageKind.PREFILL, StageKind.DECODE)
_LOSSES = (StageKind.PREEMPTED, StageKind.RESTARTED)


@dataclass(frozen=True, slots=True)
class Phases:
    queue_ns: int  # until something of it was computed
    prefill_ns: int  # until its first token
    decode_ns: int

    @property
    def inference_ns(self) -> int:
        return self.prefill_ns + self.decode_ns


def phases_of(stages: Sequence[Stage]) -> Phases:
    """`stages`: one behind the other, as a History tells them."""
    if not stages:
        return Phases(0, 0, 0)
    start_ns, end_ns = stages[0].start_ns, stages[-1].end_ns
    computed_ns = next((stage.start_ns for stage in stages if stage.kind in _COMPUTED), end_ns)
    first_token_ns = next((stage.start_ns for stage in stages if stage.kind is StageKind.DECODE), end_ns)
    return Phases(computed_ns - start_ns, first_token_ns - computed_ns, end_ns - first_token_ns)


def ns_by_kind(stages: Sequence[Stage]) -> dict[StageKind, int]:
    """As `causes_of` has it, whoever was in the way: what follows a loss, until the answer goes on, is the loss's."""
    found: dict[StageKind, int] = {}
    loss: StageKind | None = None
    for stage in stages:
        kind = stage.kind
        if kind in _LOSSES:
            loss = kind
        elif kind is StageKind.DECODE:
            loss = None
        of = loss or kind
        found[of] = found.get(of, 0) + stage.end_ns - stage.start_ns
    return found
