"""What each kernel computes, in the fewest plain torch operations; the oracle of the kernel tests, used nowhere else.

Written per sequence and without blocks where possible, so that it shares no index arithmetic with the kernels.
"""

from __future__ import annotations

import torch


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
        positions = torch.arange(context_len - (end - start), context_len)
        hidden = torch.arange(context_len) > positions[:, None]  # [new, context]
        for head in range(query.shape[1]):
            scores = query[start:end, head].double() @ keys[head // group].T / query.shape[2] ** 0.5
            out[start:end, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[head // group]
    return out
