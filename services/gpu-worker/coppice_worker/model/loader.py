"""Reads safetensors checkpoints, single-file or sharded, and says exactly what is wrong with a bad one.

All names and shapes are checked against the configuration before the first weight is read, so that a bad
checkpoint fails in milliseconds and not after minutes of reading. Pickled weights are never opened.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import CONFIG_FILE, ModelConfig
from .errors import CheckpointError
from .linear import Projections
from .weights import DecoderWeights, assemble, expected_shapes, is_redundant

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOAT_DTYPES = ("F32", "BF16", "F16")
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_DIGEST_WHOLE_BYTES = 64 << 20  # files up to this size count in full
_DIGEST_SAMPLES = 1024  # probes of a larger file, evenly spaced: every tensor above a 1024th of it is seen
_DIGEST_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come; counts parameters, as files may hold another dtype than memory."""

    parameters_done: int
    parameters_total: int


ProgressCallback = Callable[[LoadProgress], None]


def load_weights(
    checkpoint_dir: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: ProgressCallback | None = None,
    projections: Projections | None = None,
) -> DecoderWeights:
    """Loads all weights onto `device` as `dtype`. Raises CheckpointError, naming file and tensor."""
    files = weight_files(checkpoint_dir)
    source = _SafetensorsSource(files, device, dtype, sum(map(prod, expected_shapes(config).values())), on_progress)
    _check_tensors(checkpoint_dir, config, source)
    return assemble(config, source, projections or Projections())


def weight_files(checkpoint_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files. Raises CheckpointError if one is missing or none is there."""
    index = checkpoint_dir / INDEX_FILE
    if index.exists():
        return _indexed_files(index)
    single = checkpoint_dir / SINGLE_FILE
    if single.exists():
        return [single]
    if any(checkpoint_dir.glob("*.bin")) or any(checkpoint_dir.glob("*.pt*")):
        raise CheckpointError(
            checkpoint_dir,
            "holds pickled weights (.bin, .pt, .pth), which can run any code when opened and are never loaded",
            "use the model's safetensors files, or convert it with transformers' save_pretrained",
        )
    raise CheckpointError(
        checkpoint_dir, f"neither {SINGLE_FILE} nor {INDEX_FILE} is there", "point at a complete checkpoint folder"
    )


def checkpoint_digest(checkpoint_dir: Path) -> str:
    """32 hex digits that tell checkpoints apart: configuration, headers, sizes and content of the weights.

    Content counts, as two trainings of one architecture have equal headers and sizes; that of files above 64 MiB is
    sampled, 4 MiB of each. Two checkpoints that differ in a few small tensors only may then share a digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in [checkpoint_dir / CONFIG_FILE, *weight_files(checkpoint_dir)]:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _DIGEST_WHOLE_BYTES:
                digest.update(stream.read())
                continue
            header_bytes = 8 + min(struct.unpack("<Q", stream.read(8))[0], _HEADER_BYTES_MAX)
            stream.seek(0)
            digest.update(stream.read(header_bytes))
            for sample in range(_DIGEST_SAMPLES):
                stream.seek(header_bytes + (size - header_bytes) * sample // _DIGEST_SAMPLES)
                digest.update(stream.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(index, f"is no shard index ({cause!r})", "download the file again") from cause
    for name in names:
        # An index is foreign input: it may only name files beside itself.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(index, f"names {name!r}, which is no safetensors file beside it", "correct the index")
        if not (index.parent / name).exists():
            tensors = sum(1 for file in weight_map.values() if file == name)
            raise CheckpointError(
                index.parent / name,
                f"this shard is missing; {index.name} says that it holds {tensors} tensors",
                "download the shard",
            )
    return [index.parent / name for name in names]


class _SafetensorsSource:
    """Tensors of a set of open safetensors files."""

    def __init__(
        self,
        files: Sequence[Path],
        device: torch.device,
        dtype: torch.dtype,
        parameters_total: int,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._parameters_total = parameters_total
        self._parameters_done = 0
        self._on_progress = on_progress
        self._handles: dict[Path, Any] = {file: _open(file, device) for file in files}
        self.file_of = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def file_dtype(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [self.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            out[start : start + shape[0]].copy_(self._tensor(name))
            start += shape[0]
            self._report(prod(shape))
        return out

    def _slice(self, name: str) -> Any:
        return self._handles[self.file_of[name]].get_slice(name)

    def _tensor(self, name: str) -> torch.Tensor:
        file = self.file_of[name]
        try:
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as cause:
            raise CheckpointError(file, f'tensor "{name}": {cause}', "download the file again") from cause
        return tensor

    def _report(self, parameters: int) -> None:
        self._parameters_done += parameters
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._parameters_done, self._parameters_total))


def _open(file: Path, device: torch.device) -> Any:
    try:
        return safe_open(str(file), framework="pt", device=str(device))
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(
            file, f"is truncated or no safetensors file ({cause})", "compare its size and download it again"
        ) from cause


def _check_tensors(checkpoint_dir: Path, config: ModelConfig, source: _SafetensorsSource) -> None:
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in source.file_of:
            raise CheckpointError(
                checkpoint_dir,
                f'tensor "{name}" {list(shape)} is in none of its files',
                f"check that all shards and the {CONFIG_FILE} belong to one model",
            )
        file = source.file_of[name]
        if source.shape(name) != shape:
            raise CheckpointError(
                file,
                f'tensor "{name}" has shape {list(source.shape(name))}, {CONFIG_FILE} asks for {list(shape)}',
                f"check that the file and {CONFIG_FILE} belong to one model",
            )
        if source.file_dtype(name) not in _FLOAT_DTYPES:
            raise CheckpointError(
                file,
                f'tensor "{name}" has dtype {source.file_dtype(name)}',
                f"supported: {', '.join(_FLOAT_DTYPES)}; quantised weights are not",
            )
    for name in source.file_of:
        if name not in expected and not is_redundant(name, config):
            raise CheckpointError(
                source.file_of[name],
                f'tensor "{name}" is not part of the {config.family} architecture that {CONFIG_FILE} describes',
                "check that both belong to one model; biases need attention_bias or mlp_bias",
            )
