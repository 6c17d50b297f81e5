"""Which kernels serve a pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal, get_args

import torch

from coppice_worker.kernels.backend import Arithmetic, Backend, Heads, ProjectionKernels
from coppice_worker.kernels.native.backend import NativeBackend
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.library import TILE_KEYS, load, load_tile_attention, unsupported
from coppice_worker.kernels.native.packed import PACKED_DTYPES, Packer, leaves_bfloat16_to_onednn
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_backend import TorchBackend

KernelChoice = Literal["auto", "native", "torch", "triton", "flashinfer"]

_log = logging.getLogger("coppice.worker")


class KernelsUnavailable(Exception):
    """The kernels that were asked for cannot be had; the message says why."""


def choose_backend(kernels: str, pool: KvPool, heads: Heads) -> Backend:
    """Raises ValueError for an unknown choice, KernelsUnavailable for kernels that cannot be had here."""
    if kernels not in get_args(KernelChoice):
        raise ValueError(f"kernels {kernels!r} is not known; known: {', '.join(get_args(KernelChoice))}")
    device_type, dtype = pool.storage.device.type, pool.content_dtype
    if kernels == "torch":
        return TorchBackend(pool, heads)
    if kernels == "triton" or (kernels == "auto" and prefers_triton(device_type, dtype)):
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelsUnavailable("Triton's kernels are for GPUs, and this is for a CPU")
        # Imported here, as a machine without a GPU need not have Triton.
        from coppice_worker.kernels.triton.backend import TritonBackend

        return TritonBackend(pool, heads)
    if kernels == "flashinfer":
        return _flashinfer(pool, heads)
    found = _native(pool, heads)
    if isinstance(found, NativeBackend):
        return found
    if kernels == "native":
        raise KernelsUnavailable(f"there can be no compiled kernels for this model and its KV: {found}")
    if device_type == "cpu":
        _log.info("attention by torch instead of compiled kernels: %s", found)
    return TorchBackend(pool, heads)


def _flashinfer(pool: KvPool, heads: Heads) -> Backend:
    if pool.storage.device.type != "cuda":
        raise KernelsUnavailable("FlashInfer is for NVIDIA GPUs, and this is for a CPU")
    from coppice_worker.kernels.triton.flashinfer import FlashInferBackend, unsupported

    why_not = unsupported(pool)
    if why_not is not None:
        raise KernelsUnavailable(f"FlashInfer cannot serve this model and its KV: {why_not}")
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        hint = "install flashinfer-python, or take --kernels triton"
        raise KernelsUnavailable(f"FlashInfer cannot be had: {error}; {hint}") from error
    return FlashInferBackend(pool, heads, BatchPrefillWithPagedKVCacheWrapper)


def _tile_attention(pool: KvPool) -> Callable[..., None] | None:
    if pool.storage.dtype != torch.bfloat16 or pool.block_size % TILE_KEYS:
        return None
    try:
        return load_tile_attention(pool.shape.head_dim)
    except BuildError as error:
        _log.info("attention without the CPU's tiles: %s", error)
        return None


def choose_projections(
    kernels: str, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic
) -> ProjectionKernels | None:
    """Kernels for weights of that type; None where torch's are taken."""
    if device.type == "cpu":
        return _packer(kernels, dtype)
    if kernels not in ("auto", "triton", "flashinfer") or not prefers_triton(device.type, dtype):
        return None
    from coppice_worker.kernels.triton.few_rows import FewRows

    return FewRows(dtype, arithmetic)


def _packer(kernels: str, dtype: torch.dtype) -> Packer | None:
    if kernels not in ("auto", "native") or dtype not in PACKED_DTYPES:
        return None
    if dtype == torch.bfloat16:
        try:
            return Packer(dtype, tiles=True)
        except BuildError as error:
            _log.info("projections without the CPU's tiles: %s", error)
        if kernels == "auto" and leaves_bfloat16_to_onednn():
            _log.info("projections by oneDNN, as nobody has compared here; --kernels native takes compiled ones")
            return None
    try:
        return Packer(dtype)
    except BuildError as error:
        _log.info("projections by torch instead of compiled kernels: %s", error)
        return None


def prefers_triton(device_type: str, dtype: torch.dtype) -> bool:
    """On CUDA, for the dtypes that its matrix units take: exact float32 tiles would spill their registers."""
    return device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _native(pool: KvPool, heads: Heads) -> NativeBackend | str:
    """The backend, or why there is none."""
    if pool.storage.device.type != "cpu":
        return f"they are for CPUs, not {pool.storage.device.type}"
    why_not = unsupported(pool.storage.dtype, pool.shape.head_dim)
    if why_not is not None:
        return why_not
    try:
        return NativeBackend(pool, heads, load(pool.storage.dtype, pool.shape.head_dim), _tile_attention(pool))
    except BuildError as error:
        return str(error)
