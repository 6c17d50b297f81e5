"""The seam between the decoder and the kernels that know blocks.

backend = TorchBackend(pool, heads)     or TritonBackend(pool, heads), NativeBackend(pool, heads, library)
step = backend.plan(batch)              once per step: indices, masks, split counts
query = step.write(layer, qkv, angles)  once per layer: norms and rotates heads, writes keys and values into blocks
out = step.attend(layer, query)         once per layer: attends over blocks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from coppice_worker.core.batch.step_batch import Int32, SampleRows, StepBatch

Activation = Literal["silu", "gelu_tanh"]
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each [T, 1, D / 2], in the model's dtype


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads, before they are rotated."""

    query: torch.Tensor  # [D] float32
    key: torch.Tensor  # [D] float32
    eps: float


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends."""

    scale: float  # of scores
    window: int | None = None  # a token sees itself and the `window - 1` before it; None: everything before it
    soft_cap: float | None = None  # scores s become cap * tanh(s / cap), after the scale
    sinks: torch.Tensor | None = None  # [H] float32: scores that count in the softmax's sum and bring no value
    head_norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads and the layers of a model, or of this worker's share of it."""

    num_heads: int
    layers: tuple[LayerAttention, ...]


class Projection(Protocol):
    """Rows [T, in] -> [T, out], contiguous."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class ProjectionKernels(Protocol):
    """Makes projections by kernels of ours."""

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether there are such for weight [out, in]."""

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
        """Rows [T, in] -> [T, out], for weight [out, in] and bias [out]."""

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Projection:
        """Rows [T, in] -> activation(gate) * up, [T, out], for gate above up in weight [2 out, in] and bias [2 out]."""


class AttentionStep(Protocol):
    """One step's attention; each method is used once for each layer, in this order."""

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Norms (where the layer does) and rotates the heads, and puts keys and values into their slots.

        qkv [T, H + 2 HK, D], which may be overwritten. Returns queries [T, H, D]; rows may be strided, heads are
        contiguous.
        """

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attends causally over each row's whole context, of which `write` stored the end. [T, H, D] -> [T, H * D]."""


class Arithmetic(Protocol):
    """What is done between projections and attention, and to choose tokens."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds delta [T, N] to hidden [T, N] in place; returns the RMS norm of the sum, by weight [N] float32."""

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[T, 2 N], gate and up side by side -> activation(gate) * up, [T, N]."""

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """A token [R] int64 for each row of logits [R, vocab], which were changed before. Temperature 0 is an argmax.

        Every implementation draws by the same noise and rules (`torch_sampling`), so all choose the same tokens, but
        for how sums are rounded.
        """


class Backend(Protocol):
    """Everything that touches blocks on one kind of device."""

    @property
    def arithmetic(self) -> Arithmetic: ...

    def plan(self, batch: StepBatch) -> AttentionStep: ...

    def zero_blocks(self, block_ids: Int32) -> None:
        """Overwrites whole blocks, all layers of K and V, with zeros."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copies whole blocks pairwise, shapes [N]. No block may be both a source and a destination."""

    def gather_blocks(self, block_ids: Int32, staging: torch.Tensor) -> None:
        """Copies whole blocks [N] into the rows of staging [N, pool.bytes_per_block] uint8, on the pool's device."""

    def scatter_blocks(self, staging: torch.Tensor, block_ids: Int32) -> None:
        """Copies rows of staging, as `gather_blocks` leaves them, into whole blocks [N], each named once."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step of S rows and T new tokens, in tensors on the device that stay where they are.

    Whoever attends reads them when it computes, not before: what they hold changes from step to step, and rows and
    tokens of the end may be padding. A row that is padding has one new token where all rows have one, else none.
    """

    slots: torch.Tensor  # [T] int64; -1: padding, whose keys and values are stored nowhere
    context_lens: torch.Tensor  # [S] int32; 0: padding, which reads nothing, and whose output is any number
    block_tables: torch.Tensor  # [S, W] int32, rows may be strided; only what a row's length reaches is read
    query_starts: torch.Tensor  # [S + 1] int32
    common: torch.Tensor | None  # int32, what `GraphBackend.common` found; None: rows have nothing in common
    chunks: torch.Tensor | None = None  # int32, what `GraphBackend.chunks` found; None: each row has one new token


@runtime_checkable
class GraphBackend(Backend, Protocol):
    """A backend whose launches depend on the numbers of rows and tokens alone, so that a graph may hold them."""

    def plan_rows(self, rows: StepRows) -> AttentionStep: ...

    def choose_decodes(self, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """A token [S] int64 for each row of logits [S, vocab], by choices [S, CHOICE_COLUMNS] float64 on the device,
        which are as `core.choices.pack_choices` makes them and read when the tokens are computed."""

    def common_size(self, rows_max: int) -> int:
        """How many numbers `common` gives."""

    def common(self, batch: StepBatch, rows_max: int) -> Int32 | None:
        """What rows with one new token have in common, in numbers that only this backend reads; None where it is not
        worth launches of its own. It stays true while rows grow."""

    def chunks_size(self, num_tokens: int) -> int:
        """How many numbers `chunks` gives for steps of up to `num_tokens` tokens."""

    def chunks(self, batch: StepBatch, num_tokens: int) -> Int32 | None:
        """How rows with several new tokens are computed, in numbers that only this backend reads; None where the
        launches for `num_tokens` tokens have no room for them."""
