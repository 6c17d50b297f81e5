"""From logits to tokens, all rows of a step at once.

A row's token is a function of its (seed, position, logits), its own tokens and its own settings: its noise comes from
a counter, not from a generator's state, and every cut is made by value, so that neither batch mates nor sort order can
change it.

    logits -> / temperature -> keep those of at least min_p times the largest weight
           -> keep the top_k largest -> keep the smallest head with mass >= top_p
           -> weights in token order -> the first token whose running sum passes noise * total
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from coppice_worker.core.batch.choices import pack_choices
from coppice_worker.core.batch.step_batch import SampleRows

_CHUNK = 512  # tokens summed together before the running sum; a full float64 running sum costs 4x the time
_HEAD_MIN = 256  # largest logits looked at first for top_p; the whole row is sorted only if they do not suffice


def choose(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """Tokens [R] int64 for logits [R, vocab] of any float dtype. Temperature 0 is an exact argmax."""
    if not rows.temperature.any():
        return first_argmax(logits)
    return choose_packed(logits, pack_choices(rows))


def choose_packed(logits: torch.Tensor, choices: npt.NDArray[np.float64]) -> torch.Tensor:
    """Like `choose`, by choices [R, CHOICE_COLUMNS] as `pack_choices` makes them."""
    drawn = np.flatnonzero(choices[:, 0] > 0)
    if drawn.size < len(choices):
        tokens = first_argmax(logits)
    else:
        tokens = torch.empty(drawn.size, dtype=torch.int64, device=logits.device)
    if drawn.size == 0:
        return tokens
    device = logits.device
    temperature, floor, top_k, top_p, noise = choices[drawn].T
    index = torch.from_numpy(drawn).to(device)
    scaled = logits.index_select(0, index).float()
    # The maximum goes first: a tiny temperature then gives -inf, never inf - inf.
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= torch.from_numpy(temperature.astype(np.float32)).to(device).unsqueeze(1)
    weights = scaled.exp()
    # The largest weight is exp(0): min_p is a cut-off already.
    lowest = torch.from_numpy(floor.astype(np.float32)).to(device)
    cutoffs = _cutoffs(scaled, weights, lowest, top_k.astype(np.int64), top_p)
    weights.masked_fill_(scaled < cutoffs.unsqueeze(1), 0.0)
    tokens[index] = _draw(weights, torch.from_numpy(noise.copy()).to(device))
    return tokens


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] for [R, vocab]. `max` names the first of several, like `argmax`, and is several times as quick on a CPU."""
    return logits.max(dim=-1).indices


def _cutoffs(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    cutoffs: torch.Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
) -> torch.Tensor:
    """[R] smallest scaled logit that each row keeps, none below `cutoffs` [R]; -inf where nothing is filtered. Equal
    logits share a fate."""
    vocab = scaled.shape[1]
    has_k = (top_k > 0) & (top_k < vocab)
    filters = np.flatnonzero(has_k | (top_p < 1.0))
    if filters.size == 0:
        return cutoffs
    k = np.where(has_k, top_k, vocab)[filters]
    largest_k = int(k[has_k[filters]].max(initial=1))
    width = min(vocab, max(_HEAD_MIN, largest_k))
    while filters.size:
        index = torch.from_numpy(filters).to(scaled.device)
        found, enough = _cutoffs_in_head(scaled[index], weights[index], cutoffs[index], k, top_p[filters], width)
        # A row that is looked at again must start from its min_p.
        good = torch.from_numpy(enough).to(scaled.device)
        cutoffs[index] = torch.where(good, found, cutoffs[index])
        filters, k = filters[~enough], k[~enough]
        width = vocab
    return cutoffs


def _cutoffs_in_head(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    floor: torch.Tensor,
    k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    width: int,
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Cut-offs [R] from the `width` largest logits of each row, none below `floor` [R], and whether they were enough
    to tell."""
    vocab = scaled.shape[1]
    head = scaled.topk(width, dim=-1).values
    last_kept = torch.from_numpy(np.minimum(k, width) - 1).to(scaled.device).unsqueeze(1)
    kth = head.gather(1, last_kept)
    cut_by_k = torch.from_numpy(k < vocab).to(scaled.device).unsqueeze(1)
    lowest = torch.where(cut_by_k, kth, float("-inf")).maximum(floor.unsqueeze(1))
    # top_p is a share of what min_p and top_k kept, so the mass beyond the cut does not count.
    kept = weights.masked_fill(scaled < lowest, 0.0)
    share = torch.from_numpy(top_p).to(scaled.device).unsqueeze(1)
    wanted = share * _chunk_sums(kept).sum(dim=-1, keepdim=True)
    running = head.exp().masked_fill_(head < lowest, 0.0).double().cumsum(dim=-1)
    # A token stays while the mass before it is short of top_p; the first one always stays.
    num_kept = (running[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    nucleus = head.gather(1, num_kept)
    all_mass = torch.from_numpy(top_p >= 1.0).to(scaled.device).unsqueeze(1)
    cutoffs = torch.maximum(lowest, torch.where(all_mass, float("-inf"), nucleus))
    reached = (running[:, -1:] >= wanted) | all_mass
    enough = reached.squeeze(1).cpu().numpy() | (width >= vocab) | (k <= width)
    return cutoffs.squeeze(1), enough


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """[R, chunks] float64 sums of consecutive tokens' weights."""
    padding = -weights.shape[1] % _CHUNK
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    return padded.view(weights.shape[0], -1, _CHUNK).sum(dim=-1, dtype=torch.float64)


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Tokens [R]: inverse of the running sum in token order, first over chunks, then inside one."""
    running = _chunk_sums(weights).cumsum(dim=-1)
    target = noise.unsqueeze(1) * running[:, -1:]
    chunk = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = torch.where(chunk > 0, running.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    columns = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).double()
    inside.masked_fill_(columns >= weights.shape[1], 0.0)
    sums = inside.cumsum(dim=-1)
    offset = torch.searchsorted(sums, target - before, right=True)
    # Rounding may push the target past the chunk's sum: then its last token with any weight is meant.
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(offset, last)).squeeze(1)
