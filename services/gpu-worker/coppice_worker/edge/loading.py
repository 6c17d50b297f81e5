"""From settings to an executor with a model in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from coppice.errors import UsageError
from coppice.handles import BLOCKS_MAX
from coppice.namespaces import encode_namespace
from coppice.versions import versions
from coppice_worker.core.batch.step_batch import Executor, StepLimits
from coppice_worker.disk.disk_pool import DiskPool
from coppice_worker.disk.folder import identity_of
from coppice_worker.disk.opening import REPORTED_BLOCKS_MAX, blocks_within, digest_of_sources, open_pool
from coppice_worker.edge.copies.copier import TierCopier
from coppice_worker.edge.cores import default_threads
from coppice_worker.edge.load_report import LoadReport
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.kernels.choice import KernelsUnavailable
from coppice_worker.kernels.host_pool import HostPool
from coppice_worker.kernels.native.build import cpu_flags
from coppice_worker.model.config.config import CONFIG_FILE, read_config
from coppice_worker.model.config.dtypes import DtypeName
from coppice_worker.model.config.errors import PoolTooSmall
from coppice_worker.model.config.resolve import resolve_checkpoint
from coppice_worker.model.config.shard import Shard
from coppice_worker.model.decoder.ranks import RankGroup
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.graphs import CudaGraphs, Graphs
from coppice_worker.model.loader import weight_files
from coppice_worker.model.memory import MORE_DEVICES, CudaMemory, FillDevice
from coppice_worker.model.pool_size import shard_of, suggest_num_blocks

_log = logging.getLogger("coppice.worker")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in this process, or a rank's share of one."""

    executor: TorchExecutor
    model: str  # its name
    host: HostPool | None
    disk: DiskPool | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """What computes steps and copies blocks: this process, or all ranks."""

    executor: Executor
    tiers: TierCopier | None
    hung: Callable[[], None] = exit_now  # called when a step never ends
    disk: DiskPool | None = None


def resolve_settings(settings: WorkerSettings) -> WorkerSettings:
    """The same settings with what is found here: a folder with the model, the device, threads for each rank.

    Raises CoppiceError where it cannot work.
    """
    folder = resolve_checkpoint(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    num_here = settings.ranks_per_node
    if device == "cuda" and torch.cuda.device_count() < num_here:
        if settings.tensor_parallel == 1:
            raise UsageError("--device cuda: torch sees no CUDA device here", hint="use --device cpu")
        nodes = f" on --nnodes {settings.nnodes}" if settings.nnodes > 1 else ""
        sees = f"torch sees {torch.cuda.device_count()} CUDA devices here"
        problem = f"--tensor-parallel {settings.tensor_parallel}{nodes}: {sees}"
        raise UsageError(problem, hint="each rank needs one; see CUDA_VISIBLE_DEVICES")
    Shard(0, settings.tensor_parallel).share_of(read_config(folder))
    threads = settings.threads
    if device == "cpu":
        threads = max(1, (threads or default_threads()) // num_here)
    name = settings.model_name or folder.resolve().name
    changes = {"model": str(folder), "model_name": name, "device": device, "threads": threads}
    return settings.model_copy(update=changes)


def dtype_of(settings: WorkerSettings) -> DtypeName:
    """Of weights and computation. Settings come from `resolve_settings`."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if settings.device == "cuda" else "float32"


def load(settings: WorkerSettings, group: RankGroup | None = None) -> Loaded:
    """Reads the checkpoint, or this rank's share of it, and allocates the pool; kernels are warm. Raises CoppiceError.
    Settings come from `resolve_settings`."""
    folder = Path(settings.model)
    device: str = settings.device
    dtype = dtype_of(settings)
    if group is not None and device == "cuda":
        device = f"cuda:{settings.device_of(group.rank)}"
    num_blocks = settings.num_blocks or _default_blocks(settings, folder, torch.device(device), dtype, shard_of(group))
    name = settings.model_name or folder.resolve().name
    size = f"{num_blocks} blocks" if isinstance(num_blocks, int) else "as many blocks as there is room for"
    _log.info("loading %s (%s on %s), %s of %d tokens", name, dtype, device, size, settings.block_size)
    try:
        executor = TorchExecutor(
            folder,
            device=device,
            dtype=dtype,
            kv_dtype=settings.kv_dtype,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            kernels=settings.kernels,
            num_threads=settings.threads,
            limits=StepLimits(settings.max_sequences, settings.max_step_tokens),
            group=group,
            graphs=_recorder(torch.device(device), settings),
            on_progress=LoadReport(sys.stderr) if group is None or group.rank == 0 else None,
        )
        executor.warm_up()
    except KernelsUnavailable as error:
        raise UsageError(f"--kernels {settings.kernels}: {error}", hint="use --kernels auto") from error
    except torch.OutOfMemoryError as error:
        raise PoolTooSmall(
            f"the device has no room for {name} and its largest step: {error}",
            hint=f"use a smaller --max-step-tokens, --num-blocks or model, or {MORE_DEVICES}",
        ) from error
    host = _host_pool(settings, executor)
    disk = None if host is None or not settings.disk_mib else _disk_pool(settings, executor, host, name)
    return Loaded(executor, name, host, disk)


def _recorder(device: torch.device, settings: WorkerSettings) -> Callable[[], Graphs] | None:
    return partial(CudaGraphs, device) if device.type == "cuda" and settings.cuda_graphs else None


def _host_pool(settings: WorkerSettings, executor: TorchExecutor) -> HostPool | None:
    if not settings.host_memory_mib:
        return None
    per_block = executor.kv_bytes_per_block() * settings.ranks_per_node
    num_blocks = min((settings.host_memory_mib << 20) // per_block, BLOCKS_MAX)
    if not num_blocks:
        raise UsageError(
            f"--host-memory-mib {settings.host_memory_mib}: a block has {per_block} bytes",
            hint="give it more memory, or 0 for no host tier",
        )
    _log.info("%d blocks on the host", num_blocks)
    return executor.host_pool(num_blocks)


def _disk_pool(settings: WorkerSettings, executor: TorchExecutor, host: HostPool, name: str) -> DiskPool | None:
    """None where the folder cannot be had: a worker without it serves all the same."""
    assert settings.disk_folder is not None
    most = REPORTED_BLOCKS_MAX - executor.pool.num_blocks - len(host.blocks)
    num_blocks = blocks_within(settings.disk_mib << 20, host.bytes_per_block, most)
    if not num_blocks:
        raise UsageError(
            f"--disk-mib {settings.disk_mib}: a block has {host.bytes_per_block} bytes",
            hint="give it more room, or 0 for no disk tier",
        )
    # The digest of a checkpoint samples large files, which may have been replaced since the folder was written.
    checkpoint = Path(settings.model)
    files = [checkpoint / CONFIG_FILE, *weight_files(checkpoint)]
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    namespace = encode_namespace(replace(executor.namespace, model=name))
    how = dtype_of(settings), _device_name(settings), _libraries(), executor.kernels_name, str(host.bytes_per_block)
    identity = identity_of(digest_of_sources(), namespace, *how, *stamps)
    folder = Path(settings.disk_folder) / identity_of(settings.worker_id)
    pool = open_pool(folder, identity, num_blocks, host.blocks.numpy())
    if pool is not None:
        _log.info("%d blocks on the disk", num_blocks)
    return pool


def _device_name(settings: WorkerSettings) -> str:
    """Two GPUs do not compute the same bits, nor do two CPUs with other instructions."""
    if settings.device.startswith("cuda"):
        return torch.cuda.get_device_name(settings.device)
    return f"{settings.device} {' '.join(sorted(cpu_flags()))}"


def _libraries() -> str:
    """Another version may have mended a fault, or computes other bits."""
    installed = versions()
    return " ".join(f"{name} {installed.get(name)}" for name in ("torch", "triton"))


def _default_blocks(
    settings: WorkerSettings, folder: Path, device: torch.device, dtype: DtypeName, shard: Shard
) -> int | FillDevice:
    if device.type == "cuda":
        return FillDevice(CudaMemory(device), settings.gpu_memory_utilization)
    memory_bytes = (settings.kv_memory_mib << 20) // settings.ranks_per_node
    try:
        return suggest_num_blocks(
            folder,
            memory_bytes=memory_bytes,
            dtype=dtype,
            kv_dtype=settings.kv_dtype,
            block_size=settings.block_size,
            shard=shard,
        )
    except ValueError as error:
        raise UsageError(f"--kv-memory-mib {settings.kv_memory_mib}: {error}") from error
