"""From a step's logits to its tokens and what is reported of them."""

from __future__ import annotations

import numpy as np
import torch

from coppice_worker.core.batch.guides import Masks
from coppice_worker.core.batch.step_batch import Logprobs, SampleRows
from coppice_worker.kernels.backend import Arithmetic
from coppice_worker.model.decoder.logits import change_logits, mask_logits, token_logprobs


def sample_and_report(
    logits: torch.Tensor, rows: SampleRows, arithmetic: Arithmetic, masks: Masks | None = None
) -> tuple[torch.Tensor, Logprobs | None]:
    """Like `sample`, and what the rows that want log-probabilities report; these are of the logits as they came."""
    if rows.num_logprobs is None:
        return sample(logits, rows, arithmetic, masks), None
    wanted = np.flatnonzero(rows.num_logprobs >= 0)
    index = torch.from_numpy(wanted).to(logits.device)
    raw = logits.index_select(0, index)
    tokens = sample(logits, rows, arithmetic, masks)
    return tokens, token_logprobs(raw, tokens.index_select(0, index), int(rows.num_logprobs[wanted].max()))


def sample(logits: torch.Tensor, rows: SampleRows, arithmetic: Arithmetic, masks: Masks | None = None) -> torch.Tensor:
    """Tokens [R] int64 for logits [R, vocab], any float dtype, which may be overwritten."""
    if rows.changes is not None:
        logits = logits.float()
        change_logits(logits, rows.changes)
    if masks is not None:
        mask_logits(logits, masks)
    return arithmetic.choose(logits, rows)
