"""What a layer does between its projections, each in one pass over memory and in float32."""

from __future__ import annotations

import numpy as np
import torch

from coppice_worker.core.batch.choices import pack_choices
from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.native.library import ACTIVATIONS, Library
from coppice_worker.kernels.torch_sampling import choose, first_argmax


class NativeArithmetic:
    """`Arithmetic` by the compiled kernels."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert hidden.is_contiguous()
        assert delta is None or delta.is_contiguous()
        assert weight.dtype == torch.float32
        out = torch.empty_like(hidden)
        added = None if delta is None else delta.data_ptr()
        rows, size = hidden.shape
        self._library.add_norm(
            hidden.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, size, eps, torch.get_num_threads()
        )
        return out

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert both.is_contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty((rows, size))
        self._library.gate(
            both.data_ptr(), out.data_ptr(), rows, size, ACTIVATIONS[activation], torch.get_num_threads()
        )
        return out

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        if not logits.is_contiguous() or logits.dtype not in (torch.float32, torch.bfloat16):
            return choose(logits, rows)
        is_drawn = rows.temperature > 0
        tokens = torch.empty(len(logits), dtype=torch.int64) if is_drawn.all() else self.argmax(logits)
        if is_drawn.any():
            choices = np.ascontiguousarray(pack_choices(rows))
            self._library.draw_tokens(
                logits.data_ptr(), choices.ctypes.data, tokens.data_ptr(), *logits.shape,
                logits.dtype == torch.bfloat16, torch.get_num_threads(),
            )  # fmt: skip
        return tokens

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype != self._library.dtype or not logits.is_contiguous():
            return first_argmax(logits)
        rows, size = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._library.argmax(logits.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out
