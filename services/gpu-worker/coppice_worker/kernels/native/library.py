"""The compiled kernels as Python calls: addresses and sizes go in, nothing is checked there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.native.build import BuildError, build, cpu_flags

LANES = 16  # head sizes are multiples of it
TILE_ROWS = 64  # query heads of a tile, at most
TILE_DEPTH = 32  # what the bfloat16 tiles of a CPU sum over is a multiple of it
TILE_KEYS = 16  # keys that they take from one block
ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}  # as vectors.h knows them
_DTYPES = (torch.float32, torch.bfloat16)
_TILE_FLAGS = frozenset({"amx_tile", "amx_bf16", "avx512_bf16"})  # as Linux names them


class LayerRecord(ctypes.Structure):
    """`struct Layer` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "query_norm", "key_norm", "sinks")),
        ("window", c_int64),
        *((name, c_float) for name in ("norm_eps", "scale", "soft_cap")),
    )


class StepRecord(ctypes.Structure):
    """`struct Step` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "slots", "tables", "context_lens", "query_starts")),
        *((name, c_void_p) for name in ("tile_rows", "tile_starts")),
        *((name, c_int64) for name in ("num_tokens", "num_tiles", "table_width", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("block_size", "tile_tokens", "threads")),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """One build's functions, for one type of elements; kernels.cpp says what they do."""

    write: Callable[..., None]
    attend: Callable[..., None]
    add_norm: Callable[..., None]
    gate: Callable[..., None]
    argmax: Callable[..., None]
    draw_tokens: Callable[..., None]  # of sampling.cpp
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
    library = open_library(build("kernels.cpp", (*narrow, f"HEAD_DIM={head_dim}")))
    pointers, sizes = c_void_p, c_int64
    return Library(
        write=function(library, "write", pointers, sizes, pointers, sizes, *[pointers] * 2),
        attend=_attend_of(library),
        add_norm=function(library, "add_norm", *[pointers] * 4, *[sizes] * 2, c_float, c_int),
        gate=function(library, "gate", *[pointers] * 2, *[sizes] * 3, c_int),
        argmax=function(library, "argmax", *[pointers] * 2, *[sizes] * 2, c_int),
        draw_tokens=function(open_library(build("sampling.cpp")), "draw_tokens", *[pointers] * 3, *[sizes] * 3, c_int),
        dtype=dtype,
    )


def load_tile_attention(head_dim: int) -> Callable[..., None]:
    """Attention by the CPU's bfloat16 tiles, for blocks of a multiple of TILE_KEYS tokens. Raises BuildError."""
    return _attend_of(tile_library("tile_attention.cpp", (f"HEAD_DIM={head_dim}",)))


def _attend_of(library: ctypes.CDLL) -> Callable[..., None]:
    return function(library, "attend", c_void_p, c_int64, c_void_p, c_int64, c_void_p)


def function(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., None]:
    """One of its functions, with the types of what it is given."""
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, None
    return found  # type: ignore[no-any-return]


def tile_library(source: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a source that uses the CPU's tiles; it is compiled only where there are any. Raises BuildError."""
    if missing := sorted(_TILE_FLAGS - cpu_flags()):
        raise BuildError(f"this CPU has no bfloat16 tiles ({', '.join(missing)})")
    library = open_library(build(source, defines))
    if not library.may_use_tiles():
        raise BuildError("the system does not let this process use the CPU's tiles")
    return library


def open_library(path: Path) -> ctypes.CDLL:
    """Raises BuildError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"what was compiled cannot be loaded; remove it to have it compiled anew: {error}") from error
