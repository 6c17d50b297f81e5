"""Reads safetensors checkpoints, single-file or sharded, and says exactly what is wrong with a bad one.

All names and shapes are checked against the configuration before the first weight is read, so that a bad
checkpoint fails in milliseconds and not after minutes of reading. Pickled weights are never opened.

checkpoint = Checkpoint(folder, config, ...)      opened and checked
checkpoint.heads()                                of the weights only what attention needs
checkpoint.weights(projections)                   all others, one tensor after the other
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from coppice_worker.kernels.backend import Heads
from coppice_worker.model.config.config import CONFIG_FILE, ModelConfig
from coppice_worker.model.config.errors import CheckpointError
from coppice_worker.model.config.shard import WHOLE, Shard
from coppice_worker.model.decoder.linear import Projections
from coppice_worker.model.decoder.weights import (
    DecoderWeights,
    Layout,
    assemble,
    attention_layers,
    is_redundant,
    tensor_layouts,
)
from coppice_worker.model.mapped_file import FLOAT_DTYPES, HEADER_BYTES_MAX, MappedFile, Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DIGEST_WHOLE_BYTES = 64 << 20  # files up to this size count in full
_DIGEST_SAMPLES = 1024  # probes of a larger file, evenly spaced: every tensor above a 1024th of it is seen
_DIGEST_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load has come; counts parameters, as files may hold another dtype than memory."""

    parameters_done: int
    parameters_total: int


ProgressCallback = Callable[[LoadProgress], None]


class Checkpoint:
    """An opened checkpoint whose tensors are those that its configuration asks for."""

    def __init__(
        self,
        checkpoint_dir: Path,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """`config` is the whole model's; of it `shard` is loaded, onto `device` as `dtype`.

        Raises CheckpointError, naming file and tensor.
        """
        files = [MappedFile(file) for file in weight_files(checkpoint_dir)]
        layouts = tensor_layouts(config)
        _check_tensors(checkpoint_dir, config, layouts, files)
        self._config = config
        self._shard = shard
        parts = {name: _part(layout, config, shard) for name, layout in layouts.items()}
        self._source = _MappedSource(files, parts, device, dtype, on_progress)

    def heads(self) -> Heads:
        """The heads that are computed here, and how they attend."""
        return Heads(self._shard.share_of(self._config).num_heads, attention_layers(self._config, self._source))

    def weights(self, projections: Projections) -> DecoderWeights:
        """Reads all weights, in the order in which files usually hold them."""
        return assemble(self._config, self._source, projections, self._shard)


def _part(layout: Layout, config: ModelConfig, shard: Shard) -> Part:
    whole = (slice(0, size) for size in layout.shape)
    return tuple(
        every if axis is None else shard.part(axis, config) for every, axis in zip(whole, layout.axes, strict=True)
    )


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
            header_bytes = 8 + min(struct.unpack("<Q", stream.read(8))[0], HEADER_BYTES_MAX)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(index, f"is no shard index ({cause!r})", "download the file again") from cause
    for name in names:
        # An index is foreign input: it may only name files beside itself.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(index, f"names {name!r}, which is no safetensors file beside it", "correct the index")
        if not os.path.exists(index.parent / name):  # unlike Path.exists it also takes names that no file can have
            tensors = sum(1 for file in weight_map.values() if file == name)
            raise CheckpointError(
                index.parent / name,
                f"this shard is missing; {index.name} says that it holds {tensors} tensors",
                "download the shard",
            )
    return [index.parent / name for name in names]


class _MappedSource:
    """This worker's parts of the tensors of some files."""

    def __init__(
        self,
        files: Sequence[MappedFile],
        parts: Mapping[str, Part],
        device: torch.device,
        dtype: torch.dtype,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._file_of = {name: file for file in files for name in file.entries}
        self._parts = parts
        self._device = device
        self._dtype = dtype
        self._parameters_total = sum(prod(_shape(part)) for part in parts.values())
        self._parameters_done = 0
        self._on_progress = on_progress

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [_shape(self._parts[name]) for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._file_of[name].read_into(out[start : start + shape[0]], name, self._parts[name])
            start += shape[0]
            self._report(prod(shape))
        return out

    def _report(self, parameters: int) -> None:
        self._parameters_done += parameters
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._parameters_done, self._parameters_total))


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(taken.stop - taken.start for taken in part)


def _check_tensors(
    checkpoint_dir: Path, config: ModelConfig, layouts: Mapping[str, Layout], files: Sequence[MappedFile]
) -> None:
    file_of: dict[str, MappedFile] = {}
    for file in files:
        for name in file.entries:
            if name not in layouts and not is_redundant(name, config):
                raise CheckpointError(
                    file.path,
                    f'tensor "{name}" is not part of the {config.family} architecture that {CONFIG_FILE} describes',
                    "check that both belong to one model; biases need attention_bias or mlp_bias",
                )
            if name in file_of:
                raise CheckpointError(
                    file.path, f'tensor "{name}" is in {file_of[name].path.name}, too', "keep the one that is meant"
                )
            file_of[name] = file
    for name, layout in layouts.items():
        _check_tensor(checkpoint_dir, name, layout, file_of.get(name))


def _check_tensor(checkpoint_dir: Path, name: str, layout: Layout, file: MappedFile | None) -> None:
    if file is None:
        raise CheckpointError(
            checkpoint_dir,
            f'tensor "{name}" {list(layout.shape)} is in none of its files',
            f"check that all shards and the {CONFIG_FILE} belong to one model",
        )
    entry = file.entries[name]
    if entry.shape != layout.shape:
        raise CheckpointError(
            file.path,
            f'tensor "{name}" has shape {list(entry.shape)}, {CONFIG_FILE} asks for {list(layout.shape)}',
            f"check that the file and {CONFIG_FILE} belong to one model",
        )
    if entry.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            file.path,
            f'tensor "{name}" has dtype {entry.dtype}',
            f"supported: {', '.join(FLOAT_DTYPES)}; quantised weights are not",
        )
