"""What the passes of one plan sampled, and rows whose guides knew no token any more."""

from __future__ import annotations

import numpy as np

from coppice.ids import SequenceId
from coppice.messages.step import Refusal, RefusalCode
from coppice_worker.core.batch.step_batch import StepOutput, UInt32
from coppice_worker.core.batch.steps import Applied


class SampledTokens:
    def __init__(self) -> None:
        self._passes: list[UInt32] = []  # [R] each
        self._broken: set[SequenceId] = set()

    def clear(self) -> None:
        self._passes.clear()
        self._broken.clear()

    def take(self, ids: UInt32, output: StepOutput) -> None:
        """What a pass gave to the sequences `ids` [R]."""
        self._passes.append(output.tokens.astype("<u4"))
        if output.broken is not None:
            self._broken.update(map(SequenceId, ids[output.broken].tolist()))

    def give(self, applied: Applied) -> tuple[bytes, bytes, tuple[Refusal, ...]]:
        """`sampled_ids` and `sampled_tokens` of the result, and refusals of this making: a row that broke in any pass
        has given no token at all."""
        if not self._broken:
            return applied.sampled_ids, b"".join(tokens.tobytes() for tokens in self._passes), ()
        ids = np.frombuffer(applied.sampled_ids, "<u4")
        good = ~np.isin(ids, list(self._broken))
        tokens = np.stack(self._passes)[:, good]
        refusals = tuple(Refusal(sequence_id, RefusalCode.GRAMMAR, 0) for sequence_id in sorted(self._broken))
        return ids[good].tobytes(), tokens.tobytes(), refusals
