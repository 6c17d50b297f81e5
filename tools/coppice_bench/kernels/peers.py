"""Others' attention on the same queries, keys and values, these in one piece per row."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from coppice_bench.kernels.clocks import Kernel


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Packed rows of one layer."""

    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [context tokens, HK, D]
    value: torch.Tensor
    new: npt.NDArray[np.int32]  # [S] query tokens of each row
    lens: npt.NDArray[np.int32]  # [S] context tokens of each row

    @property
    def is_uniform(self) -> bool:
        return len(set(self.new.tolist())) == 1 and len(set(self.lens.tolist())) == 1

    def batched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [S, H, new, D], key and value [S, HK, length, D] of uniform rows; contiguous."""

        def row_by_row(part: torch.Tensor) -> torch.Tensor:
            return part.view(len(self.lens), -1, *part.shape[1:]).transpose(1, 2).contiguous()

        return row_by_row(self.query), row_by_row(self.key), row_by_row(self.value)


def attention_peers(layers: list[Contiguous] | None) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Peers that can be had here, and why the others cannot. Each call does the next layer."""
    peers: dict[str, Kernel] = {}
    left_out: dict[str, str] = {}
    for name, make in (("sdpa", _sdpa), ("cudnn", _cudnn), ("varlen", _varlen), ("flashinfer", _flashinfer)):
        if layers is None:
            left_out[name] = "does not take these blocks"
            continue
        try:
            calls = [make(layer) for layer in layers]
            calls[0]()
        except _LeftOut as why:
            left_out[name] = str(why)
        except Exception as error:  # a peer that fails is not measured; ours is
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        else:
            peers[name] = _in_turn(calls)
    return peers, left_out


class _LeftOut(Exception):
    """Why a peer is not measured."""


def _in_turn(calls: list[Callable[[], Any]]) -> Kernel:
    turn = count()
    return lambda: calls[next(turn) % len(calls)]()


def _sdpa(rows: Contiguous) -> Kernel:
    if not rows.is_uniform:
        raise _LeftOut("rows of several lengths")
    from torch.nn.attention.bias import causal_lower_right  # brings the compiler

    query, key, value = rows.batched()
    mask: Any = None if rows.new[0] == 1 else causal_lower_right(query.shape[2], key.shape[2])

    def call() -> torch.Tensor:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows.query.shape[0], -1)

    return call


def _cudnn(rows: Contiguous) -> Kernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if rows.query.device.type != "cuda":
        raise _LeftOut("it is for CUDA")
    is_causal = int(rows.new.max()) > 1
    if not rows.is_uniform or (is_causal and rows.new[0] != rows.lens[0]):
        raise _LeftOut("rows of several lengths, or chunks after a context")
    query, key, value = rows.batched()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    return call


def _varlen(rows: Contiguous) -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    if rows.query.device.type != "cuda":
        raise _LeftOut("it is for CUDA")
    starts = [
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(rows.query.device)
        for counts in (rows.new, rows.lens)
    ]
    longest = int(rows.new.max()), int(rows.lens.max())
    window = (-1, -1) if longest[0] == 1 else (-1, 0)
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        raise _LeftOut("this torch's takes as many heads of keys as of queries")
    return lambda: varlen_attn(
        rows.query, rows.key, rows.value, starts[0], starts[1], *longest, window_size=window, enable_gqa=True
    )


def _flashinfer(rows: Contiguous) -> Kernel:
    if importlib.util.find_spec("flashinfer") is None:
        raise _LeftOut("not installed")
    if rows.query.device.type != "cuda":
        raise _LeftOut("it is for CUDA")
    import flashinfer

    (_, num_heads, head_dim), num_kv_heads = rows.query.shape, rows.key.shape[1]
    page = 16
    if (rows.lens % page).any():
        raise _LeftOut("rows that end within a page")
    pages = rows.lens // page
    kv = torch.stack([part.view(-1, page, *part.shape[1:]) for part in (rows.key, rows.value)], dim=1).contiguous()
    device = rows.query.device
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)).to(device)
    indices = torch.arange(int(pages.sum()), dtype=torch.int32, device=device)
    last = torch.full((len(pages),), page, dtype=torch.int32, device=device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    if int(rows.new.max()) == 1:
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, num_heads, num_kv_heads, head_dim, page, q_data_type=rows.query.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(rows.new)]).astype(np.int32)).to(device)
        wrapper.plan(
            starts, indptr, indices, last, num_heads, num_kv_heads, head_dim, page,
            causal=True, q_data_type=rows.query.dtype,
        )  # fmt: skip
    return lambda: wrapper.run(rows.query, kv)
