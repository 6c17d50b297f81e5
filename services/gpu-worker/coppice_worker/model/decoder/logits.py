"""What is done to logits before a token is chosen, and what is reported of them.

Changes touch only the logits of tokens that a row has or names, so their cost does not grow with the vocabulary:

    repetition     l / r where l > 0, else l * r      if prompt or output has the token (Keskar et al. 2019, CTRL)
    frequency      l - f * times in the output
    presence       l - p                              if the output has it
    bias           l + b
    mask           -inf                               if the grammar of the row's output does not allow the token
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from coppice_worker.core.batch.guides import Masks
from coppice_worker.core.batch.step_batch import LogitChanges, Logprobs


def change_logits(logits: torch.Tensor, changes: LogitChanges) -> None:
    """Changes logits [R, vocab] float32 in place."""
    vocab, device = logits.shape[1], logits.device
    flat = logits.view(-1)
    if changes.token_ids.size:
        places = torch.from_numpy(changes.token_rows * vocab + changes.token_ids).to(device)
        places, index = torch.unique(places, return_inverse=True)
        times = torch.zeros(places.shape, device=device)
        times.index_add_(0, index, torch.from_numpy(changes.is_output).to(device).float())
        row = places.div(vocab, rounding_mode="floor")
        repetition, frequency, presence = (
            torch.from_numpy(values).to(device)[row]
            for values in (changes.repetition, changes.frequency, changes.presence)
        )
        found = flat[places]
        found = torch.where(found > 0, found / repetition, found * repetition)
        found -= times * frequency
        found -= (times > 0) * presence
        flat[places] = found
    # A bias for a token that the model does not have is for nothing.
    known = changes.bias_ids < vocab
    if known.any():
        places = torch.from_numpy((changes.bias_rows * vocab + changes.bias_ids)[known]).to(device)
        flat.index_add_(0, places, torch.from_numpy(changes.bias[known]).to(device))


def mask_logits(logits: torch.Tensor, masks: Masks) -> None:
    """Forbids tokens to the guided rows of logits [R, vocab], in place; no other row is touched."""
    if not len(masks.rows):
        return
    device = logits.device
    forbidden = torch.from_numpy(masks.forbidden).to(device)
    rows = torch.from_numpy(masks.rows.astype(np.int64)).to(device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
    """Of tokens [N], under the softmax of logits [N, vocab] in float32."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1))
    chosen = own - total
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return Logprobs(
        chosen=chosen.squeeze(1).cpu().numpy(),
        top_ids=top.indices.cpu().numpy().astype(np.int32),
        top=(top.values - total).cpu().numpy(),
        ranks=(logits >= own).sum(dim=-1, dtype=torch.int32).cpu().numpy() if ranks else None,
    )


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Of prompt tokens, in slices; all have ranks."""
    return Logprobs(
        chosen=np.concatenate([part.chosen for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts if part.ranks is not None]),
    )
