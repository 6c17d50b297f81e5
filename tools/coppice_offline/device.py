"""The torch executor of `coppice.LLM`, on what the user chose."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from coppice.errors import UsageError
from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.config.dtypes import DtypeName
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.graphs import CudaGraphs
from coppice_worker.model.memory import CudaMemory, FillDevice
from coppice_worker.model.pool_size import suggest_num_blocks

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]


def load_executor(
    folder: Path,
    *,
    device: DeviceName,
    dtype: DtypeChoice,
    num_blocks: int | None,
    kv_memory_mib: int,
    gpu_memory_utilization: float,
    limits: StepLimits,
    block_size: int,
    threads: int | None,
) -> TorchExecutor:
    """Raises UsageError, CheckpointError among them."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {device!r}; it must be auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, and torch sees no CUDA device here", hint="use device='cpu'")
    if min(block_size, kv_memory_mib, num_blocks or 1) < 1:
        raise UsageError("block_size, kv_memory_mib and num_blocks must be at least 1")
    if not 0 < gpu_memory_utilization <= 1:
        raise UsageError(f"gpu_memory_utilization is {gpu_memory_utilization}; it must be above 0 and at most 1")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    name: DtypeName = ("bfloat16" if chosen == "cuda" else "float32") if dtype == "auto" else dtype
    try:
        blocks: int | FillDevice
        if num_blocks is not None:
            blocks = num_blocks
        elif chosen == "cuda":
            blocks = FillDevice(CudaMemory(torch.device(chosen)), gpu_memory_utilization)
        else:
            blocks = suggest_num_blocks(folder, memory_bytes=kv_memory_mib << 20, dtype=name, block_size=block_size)
        executor = TorchExecutor(
            folder,
            device=chosen,
            dtype=name,
            num_blocks=blocks,
            block_size=block_size,
            num_threads=threads,
            limits=limits,
            graphs=partial(CudaGraphs, torch.device(chosen)) if chosen == "cuda" else None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    executor.warm_up()
    return executor


def give_memory_back() -> None:
    """Of what nobody refers to any more: to the device on a GPU, not to torch's own store."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
