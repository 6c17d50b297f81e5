"""What each kernel computes, in the fewest plain torch operations; the oracle of the kernel tests, used nowhere else.

Written per sequence and without blocks where possible, so that it shares no index arithmetic with the kernels.
"""

from __future__ import annotations

import torch

from coppice_worker.kernels.backend import LayerAttention


def write_kv(pool: torch.Tensor, heads: torch.Tensor, slots: torch.Tensor) -> None:
    """Puts heads [T, HK, D] into pool [num_blocks, HK, block, D] at slots [T]."""
    block_size = pool.shape[2]
    for token, slot in enumerate(slots.tolist()):
        pool[slot // block_size, :, slot % block_size] = heads[token]


def context_of(pool: torch.Tensor, table: torch.Tensor, context_len: int) -> torch.Tensor:
    """[HK, context_len, D] of one sequence, in the order of its positions."""
    blocks = pool[table.long()]  # [W, HK, block, D]
    tokens = blocks.transpose(0, 1).flatten(1, 2)
    return tokens[:, :context_len]


def attend(
    layer: LayerAttention,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of packed queries [T, H, D] over blocks; returns [T, H, D] in float64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for row, context_len in enumerate(context_lens.tolist()):
        start, end = int(query_starts[row]), int(query_starts[row + 1])
        used = -(-context_len // key_pool.shape[2])
        keys = context_of(key_pool, tables[row, :used], context_len).double()
        values = context_of(value_pool, tables[row, :used], context_len).double()
        group = query.shape[1] // keys.shape[0]
        hidden = _hidden(torch.arange(context_len - (end - start), context_len), context_len, layer.window)
        # A token that no query sees may hold anything.
        keys, values = (torch.where(hidden.all(0)[None, :, None], 0.0, part) for part in (keys, values))
        for head in range(query.shape[1]):
            scores = query[start:end, head].double() @ keys[head // group].T * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
            scores = scores.masked_fill(hidden, float("-inf"))
            if layer.sinks is not None:
                sink = layer.sinks[head].double().expand(end - start, 1)
                scores = torch.cat([scores, sink], dim=1)
            weights = scores.softmax(-1)[:, :context_len]
            out[start:end, head] = weights @ values[head // group]
    return out


def _hidden(positions: torch.Tensor, context_len: int, window: int | None) -> torch.Tensor:
    """[new, context], True where the token at that position does not see the other."""
    distance = positions[:, None] - torch.arange(context_len)
    return (distance < 0) | (distance >= (context_len if window is None else window))
