"""The torch executor: one decoder, one pool of blocks, steps strictly in call order.

TorchExecutor(checkpoint, device="cpu", dtype="float32", num_blocks=suggest_num_blocks(...), block_size=16)
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from coppice.namespaces import NamespaceFields
from coppice_worker.core.batch.step_batch import Int32, Pending, PoolSpec, StepBatch, StepLimits, StepOutput
from coppice_worker.kernels.backend import GraphBackend
from coppice_worker.kernels.choice import KernelChoice, choose_backend, choose_projections
from coppice_worker.kernels.host_pool import HostPool
from coppice_worker.kernels.native.packed import Packer
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.upload import Upload
from coppice_worker.model.config.config import read_config
from coppice_worker.model.config.dtypes import NAMES, DtypeName, KvDtypeName, kv_dtype_of, torch_dtype_of
from coppice_worker.model.config.info import ModelInfo, describe
from coppice_worker.model.decoder.decoder import Decoder
from coppice_worker.model.decoder.linear import Projections
from coppice_worker.model.decoder.outputs import Outputs
from coppice_worker.model.decoder.ranks import RankGroup
from coppice_worker.model.graphs import Graphs, StepGraphs, graph_sizes, graph_state, is_plain, mixed_sizes
from coppice_worker.model.loader import Checkpoint, ProgressCallback, checkpoint_digest
from coppice_worker.model.memory import DeviceMemory, FillDevice, blocks_that_fit, graphs_bytes, measure
from coppice_worker.model.pool_size import kv_shape, shard_of
from coppice_worker.model.warm_up import largest_step, warm_up_steps

DEFAULT_LIMITS = StepLimits()
_GRAPHS_PER_LINE = 6  # of the log
_log = logging.getLogger("coppice.worker")


class TorchExecutor:
    """Owns the weights and the physical blocks; computes steps on one device."""

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        kv_dtype: KvDtypeName = "auto",
        num_blocks: int | FillDevice,
        block_size: int = 16,
        kernels: KernelChoice = "auto",
        num_threads: int | None = None,
        limits: StepLimits = DEFAULT_LIMITS,
        group: RankGroup | None = None,
        graphs: Callable[[], Graphs] | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Loads the checkpoint and allocates the pool. `num_threads` sets torch's CPU threads for the process. In a
        `group` of ranks it is this rank's share, and all ranks do the same at the same time. With `graphs`, steps of
        decodes and smaller ones of chunks are recorded when the executor is warmed up, where its kernels allow it.

        Raises CheckpointError for a checkpoint that cannot be used, ValueError for an unknown dtype or kernel choice,
        PoolTooSmall where a device that is to be filled has no room.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device, self._dtype = torch.device(device), torch_dtype_of(dtype)
        self._kv_dtype = kv_dtype_of(kv_dtype, dtype)
        self._config = read_config(checkpoint_dir)
        shard = shard_of(group)
        self._share = shard.share_of(self._config)
        checkpoint = Checkpoint(
            checkpoint_dir, self._config, shard=shard, device=self._device, dtype=self._dtype, on_progress=on_progress
        )
        self._kernels, self._limits, self._group = kernels, limits, group
        self._heads = checkpoint.heads()
        fill = num_blocks if isinstance(num_blocks, FillDevice) else None
        free_before = fill.memory.total_and_free()[1] if fill else 0
        self._recorder = graphs
        self._graphs: StepGraphs | None = None
        self._use_pool(num_blocks if isinstance(num_blocks, int) else 1, block_size)
        arithmetic = self._backend.arithmetic
        ours = choose_projections(kernels, self._device, self._dtype, arithmetic)
        self._packs = isinstance(ours, Packer)
        projections = Projections(arithmetic.gate, ours, group)
        weights = checkpoint.weights(projections)
        self._decoder = Decoder(self._share, weights, arithmetic)
        self._upload = Upload(self._device)
        self._outputs = Outputs(self._decoder, arithmetic, self._upload)
        self._info = describe(self._config, checkpoint_digest(checkpoint_dir), NAMES[self._kv_dtype])
        if fill:
            self._use_pool(self._num_blocks_to_fill(fill, free_before), block_size)

    def _use_pool(self, num_blocks: int, block_size: int) -> None:
        shape = kv_shape(self._share)
        self._pool = KvPool(
            shape,
            num_blocks=num_blocks,
            block_size=block_size,
            device=self._device,
            dtype=self._kv_dtype,
            content_dtype=self._dtype,
        )
        self._backend = choose_backend(self._kernels, self._pool, self._heads)

    @torch.inference_mode()
    def _num_blocks_to_fill(self, fill: FillDevice, free_before: int) -> int:
        """Measured with a step over a pool of one block."""
        limits, size = self._limits, self._pool.block_size
        largest = largest_step(limits.max_sequences, limits.max_step_tokens, self._config.max_context, size)
        use = measure(fill.memory, free_before, lambda: self.execute(largest), lambda: self._graphs_bytes(fill.memory))
        per_block = self.kv_bytes_per_block()
        needed = -(-min(limits.max_step_tokens, self._config.max_context) // size)
        found = blocks_that_fit(use, utilization=fill.utilization, bytes_per_block=per_block, num_blocks_min=needed)
        num_blocks = min(found, fill.num_blocks_max)
        if self._group is not None:
            num_blocks = self._group.least(num_blocks)
        _log.info("%d blocks of %d tokens: %s", num_blocks, size, use.describe(fill.utilization))
        return num_blocks

    def _graphs_bytes(self, memory: DeviceMemory) -> int:
        free_before = memory.total_and_free()[1]
        graphs = self._new_graphs()
        if graphs is None:
            return 0
        state = max(0, free_before - memory.total_and_free()[1])  # what rows keep on the device
        mixed = graphs_bytes(memory, graphs.capture_mixed, mixed_sizes(self._limits.max_step_tokens))
        return state + mixed + graphs_bytes(memory, graphs.capture, graph_sizes(self._limits.max_sequences))

    @property
    def pool(self) -> PoolSpec:
        return PoolSpec(num_blocks=self._pool.num_blocks, block_size=self._pool.block_size)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kernels_name(self) -> str:
        """Which kernels were chosen, and whether projections are by compiled ones."""
        return f"{type(self._backend).__name__}{' and packed projections' if self._packs else ''}"

    @property
    def namespace(self) -> NamespaceFields:
        """What the KV in this pool depends on beside tokens."""
        return NamespaceFields(
            model=self._info.family,
            revision=self._info.checkpoint_digest,
            kv_dtype=self._info.kv_dtype,
            block_size=self._pool.block_size,
            rope=self._info.rope.describe(),
        )

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block, K and V of all layers, scales included."""
        return self._pool.bytes_per_block

    def host_pool(self, num_blocks: int) -> HostPool:
        """Blocks on the host for those of this pool. Raises UnavailableError."""
        return HostPool(self._pool, self._backend, num_blocks)

    def warm_up(self) -> None:
        """Computes a step of each kind and records graphs, so that no request waits for kernels to compile or memory to
        grow.

        Uses and then zeroes the first blocks: call it before any block is handed out.
        """
        for step in warm_up_steps(self._pool.block_size, self._limits, self._config.max_context):
            self.execute(step)
        used = np.arange(min(2, self._pool.num_blocks), dtype=np.int32)
        self.copy_blocks(used[:-1], used[1:])
        self.zero_blocks(used)
        self.record_graphs()

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Touches no block."""
        graphs = self._new_graphs()
        if graphs is None:
            return
        captures = [partial(graphs.capture_mixed, size) for size in reversed(mixed_sizes(self._limits.max_step_tokens))]
        captures += [partial(graphs.capture, size) for size in reversed(graph_sizes(self._limits.max_sequences))]
        for num_done, capture in enumerate(captures):
            capture()
            if num_done % _GRAPHS_PER_LINE == 0 or num_done + 1 == len(captures):
                _log.info("capturing graphs %d/%d", num_done + 1, len(captures))
        self._graphs = graphs

    def _new_graphs(self) -> StepGraphs | None:
        if self._recorder is None or not isinstance(self._backend, GraphBackend):
            return None
        width = -(-self._config.max_context // self._pool.block_size)
        rows_max = graph_sizes(self._limits.max_sequences)[-1]
        state = graph_state(self._backend, rows_max, width, self._device, tokens_max=self._limits.max_step_tokens)
        return StepGraphs(self._recorder(), state, self._decoder, self._backend, self._dtype)

    @torch.inference_mode()
    def zero_blocks(self, block_ids: Int32) -> None:
        if block_ids.size:
            self._backend.zero_blocks(block_ids)

    @torch.inference_mode()
    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        assert src.shape == dst.shape
        if src.size:
            self._backend.copy_blocks(src, dst)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepOutput:
        batch.check()
        if self._graphs is None or not is_plain(batch):
            return self._outputs.of(batch, partial(self._hidden, batch))
        pending = self._graphs.launch(batch)
        return self._outputs.of(batch, partial(self.forward, batch)) if pending is None else pending.wait()

    def _hidden(self, batch: StepBatch) -> torch.Tensor:
        found = None if self._graphs is None else self._graphs.hidden(batch)
        return self.forward(batch) if found is None else found

    def runs_ahead(self, batch: StepBatch) -> bool:
        return self._graphs is not None and self._graphs.takes_decodes(batch) and is_plain(batch)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Pending:
        """Only for what `runs_ahead`, and what follows it."""
        assert self._graphs is not None
        pending = self._graphs.launch(batch)
        assert pending is not None
        return pending

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Runs the step like `execute`, without graphs, but returns the sampled rows' logits [R, vocab]."""
        batch.check()
        return self._outputs.logits(batch, self.forward(batch))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Writes the step's KV; hidden states [T, hidden] before the final norm."""
        step = self._backend.plan(batch)
        token_ids, positions = self._upload.lend([batch.token_ids, batch.positions])
        return self._decoder.forward(token_ids, positions, step)

    def close(self) -> None:
        """Gives the graphs back: ranks cannot part from each other while one holds a sum of theirs."""
        self._graphs = None
        gc.collect()
