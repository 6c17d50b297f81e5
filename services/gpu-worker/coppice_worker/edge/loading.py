"""From settings to an executor with a model in it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from coppice.errors import UsageError
from coppice.handles import BLOCKS_MAX
from coppice_worker.core.batch import StepLimits
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.kernels.choice import KernelsUnavailable
from coppice_worker.kernels.host_pool import HostPool
from coppice_worker.model.executor import DtypeName, TorchExecutor, suggest_num_blocks
from coppice_worker.model.memory import CudaMemory, FillDevice
from coppice_worker.model.resolve import resolve_checkpoint

_log = logging.getLogger("coppice.worker")


@dataclass(frozen=True, slots=True)
class Loaded:
    executor: TorchExecutor
    model: str  # its name
    host: HostPool | None


def load(settings: WorkerSettings) -> Loaded:
    """Reads the checkpoint and allocates the pools; kernels are warm. Raises CoppiceError."""
    folder = resolve_checkpoint(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here", hint="use --device cpu")
    dtype: DtypeName = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    num_blocks = settings.num_blocks or _default_blocks(settings, folder, device, dtype)
    name = settings.model_name or folder.resolve().name
    size = f"{num_blocks} blocks" if isinstance(num_blocks, int) else "as many blocks as there is room for"
    _log.info("loading %s (%s on %s), %s of %d tokens", name, dtype, device, size, settings.block_size)
    try:
        executor = TorchExecutor(
            folder,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            kernels=settings.kernels,
            num_threads=settings.threads,
            limits=StepLimits(settings.max_sequences, settings.max_step_tokens),
        )
    except KernelsUnavailable as error:
        raise UsageError(f"--kernels {settings.kernels}: {error}", hint="use --kernels auto") from error
    executor.warm_up()
    return Loaded(executor, name, _host_pool(settings, executor))


def _host_pool(settings: WorkerSettings, executor: TorchExecutor) -> HostPool | None:
    if not settings.host_memory_mib:
        return None
    per_block = executor.kv_bytes_per_block()
    num_blocks = min((settings.host_memory_mib << 20) // per_block, BLOCKS_MAX)
    if not num_blocks:
        raise UsageError(
            f"--host-memory-mib {settings.host_memory_mib}: a block has {per_block} bytes",
            hint="give it more memory, or 0 for no host tier",
        )
    _log.info("%d blocks on the host", num_blocks)
    return executor.host_pool(num_blocks)


def _default_blocks(settings: WorkerSettings, folder: Path, device: str, dtype: DtypeName) -> int | FillDevice:
    if device == "cuda":
        return FillDevice(CudaMemory(torch.device(device)), settings.gpu_memory_utilization)
    memory_bytes = settings.kv_memory_mib << 20
    try:
        return suggest_num_blocks(folder, memory_bytes=memory_bytes, dtype=dtype, block_size=settings.block_size)
    except ValueError as error:
        raise UsageError(f"--kv-memory-mib {settings.kv_memory_mib}: {error}") from error
