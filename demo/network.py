"""A small Llama in plain torch, its parameters named as in `transformers.LlamaForCausalLM`: export renames nothing.

ids [batch, tokens] ─► embedding ─► 4 x (norm, attention, norm, gated MLP) ─► norm ─► embedding transposed ─► logits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in elements. `context_tokens` is the longest sequence that the model is trained on."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 640
    context_tokens: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.shape.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k = rotate(k, rope).repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(q, rope).to(v.dtype), k.to(v.dtype), v, is_causal=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rope))
        added: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x + added


class Trunk(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, rope: Tensor) -> Tensor:
        x = self.dropout(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, rope)
        normed: Tensor = self.norm(x)
        return normed


class Llama(nn.Module):
    """`forward(ids [batch, tokens] int64) -> logits [batch, tokens, vocabulary]`."""

    def __init__(self, shape: Shape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, dropout)
        self.register_buffer("rope", rope_table(shape), persistent=False)
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        rope = self.get_buffer("rope")[:, : ids.shape[1]]
        return F.linear(self.model(ids, rope), self.model.embed_tokens.weight)

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if ends_residual else 0.02)


def rope_table(shape: Shape) -> Tensor:
    """[2, context_tokens, head_dim]: cosines, then sines, each half repeated as the Hugging Face layout has it."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.context_tokens).float(), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of x [batch, heads, tokens, head_dim] by its position's angle."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * rope[0] + turned * rope[1]
