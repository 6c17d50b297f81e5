"""Draws tokens by the compiled kernel."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coppice_worker.core.batch import SampleRows

from .build import build
from .library import open_library

_ARRAYS = ("logits", "rows", "temperature", "top_k", "top_p", "min_p", "noise", "tokens")


class DrawsCall(ctypes.Structure):
    """`struct Draws` of sampling.cpp."""

    _fields_ = (*((name, c_void_p) for name in _ARRAYS), *((name, c_int64) for name in ("num_rows", "vocab", "narrow")))


class NativeSampler:
    """Raises BuildError where there is no compiler."""

    def __init__(self) -> None:
        library = open_library(build("sampling.cpp"))
        self._draw = library.draw_tokens
        self._draw.argtypes, self._draw.restype = [POINTER(DrawsCall), c_int], None

    def draw(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        drawn: npt.NDArray[np.int64],
        noise: npt.NDArray[np.float64],
    ) -> torch.Tensor:
        """Tokens [N] int64 of rows `drawn` [N] of logits [R, vocab], float32 or bfloat16, with noise [N] in (0, 1)."""
        assert logits.is_contiguous()
        assert logits.dtype in (torch.float32, torch.bfloat16)
        tokens = np.empty(len(drawn), np.int64)
        arrays: dict[str, npt.NDArray[Any]] = {
            "rows": drawn,
            "temperature": rows.temperature[drawn],
            "top_k": rows.top_k[drawn],
            "top_p": rows.top_p[drawn],
            "min_p": rows.min_p[drawn],
            "noise": noise,
            "tokens": tokens,
        }
        call = DrawsCall(
            logits=logits.data_ptr(),
            **{name: array.ctypes.data for name, array in arrays.items()},
            num_rows=len(drawn),
            vocab=logits.shape[1],
            narrow=logits.dtype == torch.bfloat16,
        )
        self._draw(ctypes.byref(call), torch.get_num_threads())
        return torch.from_numpy(tokens)
