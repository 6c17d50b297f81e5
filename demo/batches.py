"""Training batches as a function of the seed and the step alone, so that a resumed run sees what a whole one would.

Each epoch renders every document anew, shuffles them, joins them with END and cuts the stream into windows:

    END doc END doc END doc END doc ...
    [---- context + 1 ----)
                         [---- context + 1 ----)      the last token of one window is the first of the next
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.corpus import Document
from demo.formats import render
from demo.tokenizer import END_ID


def epoch_stream(documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> np.ndarray:
    """One epoch's token ids, int64: every document once, in one random form, each after END, and END at the end."""
    rng = random.Random(seed)
    texts = [render(document, rng) for document in documents]
    rng.shuffle(texts)
    ids: list[int] = [END_ID]
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, END_ID]
    return np.asarray(ids, dtype=np.int64)


def batches(
    documents: Sequence[Document], tokenizer: Tokenizer, *, context_tokens: int, rows: int, seed: int
) -> Iterator[Tensor]:
    """Endless [rows, context_tokens + 1] int64 batches; an epoch's last, incomplete batch is dropped."""
    for epoch in count():
        epoch_seed = seed * 1_000 + epoch
        stream = epoch_stream(documents, tokenizer, epoch_seed)
        offset = random.Random(epoch_seed).randrange(context_tokens)
        windows = np.lib.stride_tricks.sliding_window_view(stream[offset:], context_tokens + 1)[::context_tokens]
        order = np.random.default_rng(epoch_seed).permutation(len(windows))
        for start in range(0, len(order) - rows + 1, rows):
            yield torch.from_numpy(windows[order[start : start + rows]].copy())
