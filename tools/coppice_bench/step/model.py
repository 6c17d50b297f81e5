"""What `coppice bench step` measures: one decoder with random weights, its sequences on blocks or each in one stretch.

Both attend over the same content with the same projections, norms, rotation and writes; what differs is where keys and
values lie and who attends:

    Sequences    blocks all over the pool               the worker's kernels
    Contiguous   one stretch of memory per sequence     torch's scaled_dot_product_attention
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from coppice_worker.core.batch.plain_batch import packed_batch, rows_alike
from coppice_worker.core.batch.step_batch import Int32, Int64, Pending, StepBatch
from coppice_worker.kernels.backend import Angles, AttentionStep, GraphBackend, Heads
from coppice_worker.kernels.choice import choose_backend, choose_projections
from coppice_worker.kernels.pool import KvPool
from coppice_worker.model.config.config import CONFIG_FILE, ModelConfig, read_config
from coppice_worker.model.decoder.decoder import Decoder
from coppice_worker.model.decoder.linear import Projections
from coppice_worker.model.decoder.sampler import sample_and_report
from coppice_worker.model.decoder.weights import DecoderWeights, assemble, attention_layers, tensor_layouts
from coppice_worker.model.graphs import CudaGraphs, Graphs, StepGraphs, graph_state
from coppice_worker.model.pool_size import kv_shape

_SEED = 0
_IN_A_ROW = 8  # steps of a graph that are launched one ahead, as a worker does


@dataclass(frozen=True, slots=True)
class StepShape:
    """One kind of step: `batch` sequences with `new_tokens` each, at the end of `context` tokens."""

    batch: int
    new_tokens: int
    context: int  # tokens, with the new ones


def config_of(**values: Any) -> ModelConfig:
    """A Llama with these keys of a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        known = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, **values}
        Path(folder, CONFIG_FILE).write_text(json.dumps(known), encoding="utf-8")
        return read_config(Path(folder))


class RandomTensors:
    """Weights that were never trained."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._layouts = tensor_layouts(config)
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(_SEED)

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [self._layouts[name].shape for name in names]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        return out.normal_(0, 0.02, generator=self._generator) if out.dim() > 1 else out.fill_(1)


class StepModel:
    """A decoder of random weights, as a worker would have it on this device."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        pool = self.pool(num_blocks=1, block_size=16)
        layers = attention_layers(config, RandomTensors(config, device, dtype))
        self.heads = Heads(config.num_heads, layers)
        self._arithmetic = choose_backend("auto", pool, self.heads).arithmetic
        kernels = choose_projections("auto", device, dtype, self._arithmetic)
        self.weights = self.random_weights(Projections(self._arithmetic.gate, kernels))
        self._decoder = Decoder(config, self.weights, self._arithmetic)

    def random_weights(self, projections: Projections) -> DecoderWeights:
        """The same with each call."""
        return assemble(self.config, RandomTensors(self.config, self.device, self.dtype), projections)

    def kv_bytes(self, num_tokens: int) -> int:
        return kv_shape(self.config).bytes_per_block(num_tokens, self.dtype)

    def pool(self, num_blocks: int, block_size: int) -> KvPool:
        shape = kv_shape(self.config)
        return KvPool(shape, num_blocks=num_blocks, block_size=block_size, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def logits(self, sequences: Sequences) -> torch.Tensor:
        """[batch, vocab] behind each sequence's last token."""
        batch = sequences.batch
        tokens, positions, last = (
            torch.from_numpy(array).to(self.device)
            for array in (batch.token_ids, batch.positions, batch.query_starts[1:] - 1)
        )
        hidden = self._decoder.forward(tokens, positions, sequences.plan())
        return self._decoder.logits(hidden.index_select(0, last))

    @torch.inference_mode()
    def chosen(self, sequences: Sequences) -> torch.Tensor:
        """The likeliest token of each sequence, [batch] int64 on the device."""
        tokens, _ = sample_and_report(self.logits(sequences), sequences.batch.sample, self._arithmetic)
        return tokens

    def step(self, sequences: Sequences) -> Int32:
        """A whole step as a worker computes it: the likeliest token of each sequence, [batch]."""
        return self.chosen(sequences).cpu().numpy().astype(np.int32)

    def step_graphs(self, sequences: Sequences, graphs: Graphs, tokens_max: int = 0) -> StepGraphs:
        """For as many rows, and mixed steps of that many tokens; nothing is captured."""
        backend = sequences.backend
        assert isinstance(backend, GraphBackend)
        rows, width = sequences.batch.block_tables.shape
        state = graph_state(backend, rows, width, self.device, tokens_max=tokens_max)
        return StepGraphs(graphs, state, self._decoder, backend, self.dtype)

    def launched(self, sequences: Sequences) -> Launched:
        """`step` as a worker launches it: decodes on a GPU are graphs, and each is launched before the last is over."""
        if self.device.type != "cuda" or len(sequences.batch.token_ids) > len(sequences.batch.context_lens):
            return Launched(partial(self.step, sequences), 1)
        return Launched(self.recorded(sequences, CudaGraphs(self.device), _IN_A_ROW), _IN_A_ROW)

    @torch.inference_mode()
    def recorded(self, sequences: Sequences, graphs: Graphs, in_a_row: int = 1) -> Callable[[], Int32]:
        """So many `step`s of decodes, all the same, as a graph; the tokens of the last."""
        backend, batch = sequences.backend, sequences.batch
        if isinstance(backend, GraphBackend) and not isinstance(sequences, Contiguous):
            steps = self.step_graphs(sequences, graphs)
            steps.capture(len(batch.context_lens))
            # As in a batch that goes on: no table is sent again.
            goes_on = replace(batch, changed_tables=np.zeros(0, np.int32))

            def launch_one() -> Pending:
                pending = steps.launch(goes_on)
                assert pending is not None, "it was captured for as many rows"
                return pending

            def again() -> Int32:
                pending = launch_one()
                for _ in range(in_a_row - 1):
                    before, pending = pending, launch_one()
                    before.wait()
                return pending.wait().tokens

            return torch.inference_mode()(again)
        tokens, positions = (torch.from_numpy(array).to(self.device) for array in (batch.token_ids, batch.positions))
        step, chosen = sequences.plan(), torch.zeros(len(tokens), dtype=torch.int64, device=self.device)

        def work() -> None:
            logits = self._decoder.logits(self._decoder.forward(tokens, positions, step))
            chosen.copy_(self._arithmetic.choose(logits, batch.sample))

        replay = graphs.capture(work)

        @torch.inference_mode()
        def launch() -> Int32:
            for _ in range(in_a_row):
                replay()
            return chosen.cpu().numpy().astype(np.int32)

        return launch


@dataclass(frozen=True, slots=True)
class Launched:
    """Steps that are launched together."""

    compute: Callable[[], Int32]
    count: int


class Sequences:
    """Sequences whose blocks lie in no order, with content that means nothing."""

    def __init__(self, model: StepModel, shape: StepShape, block_size: int) -> None:
        blocks = -(-shape.context // block_size)
        self.pool = model.pool(shape.batch * blocks, block_size)
        self.pool.storage.normal_(generator=torch.Generator(model.device).manual_seed(_SEED))
        self.backend = choose_backend("auto", self.pool, model.heads)
        new, lens = (np.full(shape.batch, tokens) for tokens in (shape.new_tokens, shape.context))
        self.batch = batch_of(new, lens, self._tables(shape.batch, blocks), block_size)

    def _tables(self, batch: int, blocks: int) -> Int32:
        return np.random.default_rng(_SEED).permutation(batch * blocks).reshape(batch, blocks).astype(np.int32)

    def plan(self) -> AttentionStep:
        return self.backend.plan(self.batch)


class Contiguous(Sequences):
    """The content of other sequences, each in one block that holds all of it."""

    def __init__(self, model: StepModel, shape: StepShape, other: Sequences) -> None:
        super().__init__(model, shape, shape.context)
        self._shape, self._heads = shape, model.heads
        for row, table in enumerate(other.batch.block_tables):
            tokens = other.pool.storage[:, :, torch.from_numpy(table).to(model.device)].transpose(2, 3).flatten(3, 4)
            self.pool.storage[:, :, row] = tokens[:, :, :, : shape.context]

    def _tables(self, batch: int, blocks: int) -> Int32:
        return np.arange(batch, dtype=np.int32).reshape(batch, 1)

    def plan(self) -> AttentionStep:
        return _ContiguousStep(super().plan(), self)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [T, H * D]."""
        num_kv_heads, head_dim = self.pool.shape.num_kv_heads, self.pool.shape.head_dim
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        scale = self._heads.layers[layer].scale
        if self._shape.new_tokens == 1:
            # Heads of a group as queries: two to four times as quick on a CPU as telling torch of the groups.
            packed = query.reshape(self._shape.batch, num_kv_heads, -1, head_dim)
            return scaled_dot_product_attention(packed, keys, values, scale=scale).reshape(self._shape.batch, -1)
        wide = query.reshape(self._shape.batch, self._shape.new_tokens, -1, head_dim).transpose(1, 2)
        out = scaled_dot_product_attention(wide, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape[0], -1)


class _ContiguousStep:
    def __init__(self, blocks: AttentionStep, sequences: Contiguous) -> None:
        self._blocks, self._sequences = blocks, sequences

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        return self._blocks.write(layer, qkv, angles)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._sequences.attend(layer, query)


def batch_of(new: Int64, lens: Int64, tables: Int32, block_size: int) -> StepBatch:
    """Rows with `new` [S] tokens at the end of contexts of `lens` [S]; the likeliest token of each is chosen."""
    batch = packed_batch(new, lens, tables, block_size, rows_alike(lens))
    return replace(batch, token_ids=np.arange(len(batch.token_ids), dtype=np.int64) % 500)
