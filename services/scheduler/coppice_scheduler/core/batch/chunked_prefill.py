"""Which prefills take part in a step, and how much of each: what is left of the token budget after the decodes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from coppice.ids import TOKEN_BYTES
from coppice_scheduler.core.state.fairness import FairShares
from coppice_scheduler.core.state.sequences import Sequence, SequenceState
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.core.state.workers import Row

ATTACH_BYTES_MAX = 8 * 1024 * 1024  # tokens of the sequences that one plan attaches, well below a message's limit


class Attaching:
    """Which sequences the plan may still attach. The first always; who has to wait is not overtaken."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def takes(self, sequence: Sequence) -> bool:
        if sequence.state is not SequenceState.GRANTED:
            return True
        num_bytes = sequence.num_known * TOKEN_BYTES
        if self._num_bytes and self._num_bytes + num_bytes > ATTACH_BYTES_MAX:
            self._num_bytes = ATTACH_BYTES_MAX
            return False
        self._num_bytes += num_bytes
        return True


def choose_chunks(
    prefills: list[Sequence], budget: int, attaching: Attaching, settings: SchedulerSettings, shares: FairShares
) -> list[Row]:
    """Chunks up to `budget` tokens together: the tenant with the least counter first, in the order of its requests.

    Each chunk is charged as it is chosen. While several tenants wait for first tokens a step takes less prefill, so
    that nobody who comes now finds a long one in flight.
    """
    rows: list[Row] = []
    if shares.contested:
        budget = min(budget, settings.contested_prefill_tokens)
    lines = _lines(prefills)
    heads = [(shares.counter(number), line[-1].request.order, number) for number, line in lines.items()]
    heapify(heads)
    while heads and budget > 0:
        _, _, number = heappop(heads)
        line = lines[number]
        sequence = line.pop()
        row = _chunk(sequence, budget, settings)
        if row is not None and attaching.takes(sequence):
            rows.append(row)
            budget -= row.num_tokens
            shares.charge(number, row.num_prefill)
            if sequence.num_to_plan - row.num_tokens <= 1:
                sequence.request.stop_wanting(shares)
        if line:
            heappush(heads, (shares.counter(number), line[-1].request.order, number))
    return rows


def _lines(prefills: list[Sequence]) -> dict[int, list[Sequence]]:
    """By tenant; who goes first stands last."""
    lines: dict[int, list[Sequence]] = {}
    for sequence in sorted(prefills, key=lambda sequence: sequence.request.order, reverse=True):
        lines.setdefault(sequence.request.tenant_number, []).append(sequence)
    return lines


def _chunk(sequence: Sequence, budget: int, settings: SchedulerSettings) -> Row | None:
    to_plan = sequence.num_to_plan
    room = sequence.lease.reserved_tokens - sequence.num_planned
    chunk = min(to_plan, settings.max_chunk_tokens, budget, room)
    if chunk <= 0:
        return None
    prefill = max(0, min(chunk, sequence.num_start_tokens - sequence.num_planned))
    return Row(sequence, chunk, chunk == to_plan, prefill)
