"""The torch executor of `coppice.LLM`, on what the user chose."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from coppice.errors import UsageError
from coppice_worker.model.executor import DtypeName, TorchExecutor, suggest_num_blocks

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]


def load_executor(
    folder: Path,
    *,
    device: DeviceName,
    dtype: DtypeChoice,
    num_blocks: int | None,
    kv_memory_mib: int,
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
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    name: DtypeName = ("bfloat16" if chosen == "cuda" else "float32") if dtype == "auto" else dtype
    try:
        blocks = num_blocks or suggest_num_blocks(
            folder, memory_bytes=kv_memory_mib << 20, dtype=name, block_size=block_size
        )
        return TorchExecutor(
            folder, device=chosen, dtype=name, num_blocks=blocks, block_size=block_size, num_threads=threads
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
