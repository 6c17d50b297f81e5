"""Attention over gathered keys and values, by torch."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from coppice_worker.kernels.backend import LayerAttention


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, layer: LayerAttention
) -> torch.Tensor:
    """Query [B, HK, G, N, D], keys and values [B, HK, M, D] -> [B, HK, G, N, D].

    `mask` is added to scores, [B or 1, 1, N, M]; no query may be left without a key.
    """
    if layer.soft_cap is not None or layer.sinks is not None:
        return _attention_in_float32(query, keys, values, mask, layer)
    num_queries, head_dim = query.shape[3:]
    # With one query each, the heads of a group are the queries of one call, and nothing is repeated for them.
    shape = (*query.shape[:3], head_dim) if num_queries == 1 else (query.shape[0], -1, num_queries, head_dim)
    attended = scaled_dot_product_attention(
        query.reshape(shape), keys, values, attn_mask=mask, scale=layer.scale, enable_gqa=num_queries > 1
    )
    return attended.reshape(query.shape)


def _attention_in_float32(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, layer: LayerAttention
) -> torch.Tensor:
    batch, num_kv_heads, group, num_queries = query.shape[:4]
    rows = (batch, num_kv_heads, group * num_queries, -1)
    scores = query.reshape(rows).float() @ keys.float().transpose(2, 3)
    scores *= layer.scale
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    scores = scores.view(batch, num_kv_heads, group, num_queries, -1)
    scores += mask.unsqueeze(2)
    if layer.sinks is not None:
        sinks = layer.sinks.view(1, num_kv_heads, group, 1, 1).expand(batch, -1, -1, num_queries, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    attended = weights.reshape(rows) @ values.float()
    return attended.view(query.shape).to(query.dtype)
