"""The compiled kernels as Python calls: addresses and sizes go in, nothing is checked there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .build import BuildError, build

LANES = 16  # head sizes are multiples of it
TILE_ROWS = 64  # query heads of a tile, at most
TILE_DEPTH = 32  # what the bfloat16 tiles of a CPU sum over is a multiple of it
TILE_KEYS = 16  # keys that they take from one block
_DTYPES = (torch.float32, torch.bfloat16)


class AttentionCall(ctypes.Structure):
    """`struct Attention` of kernels.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out", "key_pool", "value_pool", "slots", "tables")),
        *((name, c_void_p) for name in ("context_lens", "query_starts", "tile_rows", "tile_starts")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride", "num_tokens", "num_tiles")),
        *((name, c_int64) for name in ("table_width", "num_heads", "num_kv_heads", "block_size", "tile_tokens")),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """One build's functions, for one type of elements; kernels.cpp says what they do."""

    attend: Callable[..., None]
    add_norm: Callable[..., None]
    rotate: Callable[..., None]
    gate: Callable[..., None]
    argmax: Callable[..., None]
    dtype: torch.dtype


def unsupported(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why there can be no kernels for this model, or None."""
    if dtype not in _DTYPES:
        return f"they know float32 and bfloat16, not {dtype}"
    if head_dim % LANES:
        return f"the head size {head_dim} is no multiple of {LANES}"
    return None


def load(dtype: torch.dtype, head_dim: int) -> Library:
    """Compiles where needed. Raises BuildError."""
    narrow = ("BFLOAT16",) if dtype == torch.bfloat16 else ()
    path = build("kernels.cpp", (*narrow, f"HEAD_DIM={head_dim}"))
    library = open_library(path)
    pointers, sizes = c_void_p, c_int64

    def function(name: str, *arguments: Any) -> Callable[..., None]:
        found = getattr(library, name)
        found.argtypes, found.restype = (*arguments, c_int), None
        return found  # type: ignore[no-any-return]

    return Library(
        attend=function("attend", POINTER(AttentionCall)),
        add_norm=function("add_norm", *[pointers] * 4, *[sizes] * 2, c_float),
        rotate=function("rotate", *[pointers] * 3, *[sizes] * 3),
        gate=function("gate", *[pointers] * 2, *[sizes] * 2),
        argmax=function("argmax", *[pointers] * 2, *[sizes] * 2),
        dtype=dtype,
    )


def load_tile_attention(head_dim: int) -> Callable[..., None]:
    """Attention by the CPU's bfloat16 tiles, for blocks of a multiple of TILE_KEYS tokens. Raises BuildError."""
    if head_dim % TILE_DEPTH:
        raise BuildError(f"the head size {head_dim} is no multiple of {TILE_DEPTH}")
    library = open_library(build("tile_attention.cpp", (f"HEAD_DIM={head_dim}",)))
    allow_tiles(library)
    attend: Callable[..., None] = library.attend
    library.attend.argtypes, library.attend.restype = [POINTER(AttentionCall), c_int], None
    return attend


def allow_tiles(library: ctypes.CDLL) -> None:
    """Raises BuildError."""
    if not library.may_use_tiles():
        raise BuildError("the system does not let this process use the CPU's tiles")


def open_library(path: Path) -> ctypes.CDLL:
    """Raises BuildError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"what was compiled cannot be loaded; remove it to have it compiled anew: {error}") from error
