"""Which prefills take part in a step, and how much of each: what is left of the token budget after the decodes."""

from __future__ import annotations

from coppice_scheduler.core.sequences import Sequence, SequenceState
from coppice_scheduler.core.settings import SchedulerSettings
from coppice_scheduler.core.workers import Row

ATTACH_BYTES_MAX = 8 * 1024 * 1024  # tokens of the sequences that one plan attaches, well below a message's limit


class Attaching:
    """Which sequences the plan may still attach. The first always; who has to wait is not overtaken."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def takes(self, sequence: Sequence) -> bool:
        if sequence.state is not SequenceState.GRANTED:
            return True
        num_bytes = len(sequence.request.tokens)
        if self._num_bytes and self._num_bytes + num_bytes > ATTACH_BYTES_MAX:
            self._num_bytes = ATTACH_BYTES_MAX
            return False
        self._num_bytes += num_bytes
        return True


def choose_chunks(
    prefills: list[Sequence], budget: int, attaching: Attaching, settings: SchedulerSettings
) -> list[Row]:
    """Chunks in the order of the requests, up to `budget` tokens together."""
    rows = []
    prefills.sort(key=lambda sequence: sequence.request.order)
    for sequence in prefills:
        to_plan = sequence.num_to_plan
        room = sequence.lease.reserved_tokens - sequence.num_planned
        chunk = min(to_plan, settings.max_chunk_tokens, budget, room)
        if chunk > 0 and attaching.takes(sequence):
            prefill = max(0, min(chunk, sequence.num_start_tokens - sequence.num_planned))
            rows.append(Row(sequence, chunk, chunk == to_plan, prefill))
            budget -= chunk
    return rows
