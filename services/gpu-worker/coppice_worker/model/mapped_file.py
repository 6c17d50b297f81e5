"""One safetensors file, mapped into memory.

| 8 bytes: size of the header | header: JSON, name -> dtype, shape, data_offsets | data, without gaps |

The header is foreign input: everything that it says is compared with the file before anything is read, so that a
truncated or forged file fails at once.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from coppice_worker.model.config.errors import CheckpointError

FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_PREFIX_BYTES = 8
_ITEM_BYTES = {
    dtype: size
    for size, dtypes in ((8, "F64 I64 U64"), (4, "F32 I32 U32"), (2, "F16 BF16 I16 U16"), (1, "I8 U8 BOOL F8_E4M3"))
    for dtype in dtypes.split()
}

Part = tuple[slice, ...]  # of a tensor, one slice for each dimension, without steps


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes, from the beginning of the file
    end: int


class MappedFile:
    """Reads tensors, or parts of them, without a second copy in memory."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                if size <= _PREFIX_BYTES:
                    raise CheckpointError(path, f"is truncated: {size} bytes", "download the file again")
                # A private mapping, as torch wants memory that it may write; nobody does.
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as cause:
            raise CheckpointError(path, f"cannot be read ({cause})", "check the file and its permissions") from cause
        self.entries = _read_entries(path, self._map)

    def read_into(self, out: torch.Tensor, name: str, part: Part) -> None:
        """Copies that part of the tensor into `out`, which has its shape and may have any dtype and device."""
        entry = self.entries[name]
        source = torch.frombuffer(self._map, dtype=torch.uint8, offset=entry.begin, count=entry.end - entry.begin)
        out.copy_(source.view(FLOAT_DTYPES[entry.dtype]).view(entry.shape)[part])
        # What was read needs no memory any more; the system keeps it cached as long as nobody else needs the room.
        start = entry.begin - entry.begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


def _read_entries(path: Path, content: mmap.mmap) -> dict[str, Entry]:
    size = int.from_bytes(content[:_PREFIX_BYTES], "little")
    data_start = _PREFIX_BYTES + size
    if size > HEADER_BYTES_MAX or data_start > len(content):
        raise CheckpointError(
            path,
            f"is truncated or no safetensors file: a header of {size} bytes in a file of {len(content)}",
            "compare its size and download it again",
        )
    try:
        header = json.loads(content[_PREFIX_BYTES:data_start])
        header.pop("__metadata__", None)
        entries = {name: _entry(fields, data_start) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
        raise CheckpointError(
            path, f"is damaged or no safetensors file: its header is not understood ({cause!r})", "download it again"
        ) from cause
    _check_offsets(path, entries, data_start, len(content))
    return entries


def _entry(fields: dict[str, Any], data_start: int) -> Entry:
    begin, end = fields["data_offsets"]
    shape = tuple(fields["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{fields} names what is no size")
    return Entry(str(fields["dtype"]), shape, data_start + begin, data_start + end)


def _check_offsets(path: Path, entries: dict[str, Entry], data_start: int, file_bytes: int) -> None:
    """Every tensor begins where the one before it ends, the last one ends with the file, and each is as long as it
    says."""
    expected = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        item_bytes = _ITEM_BYTES.get(entry.dtype)
        if item_bytes is not None and entry.end - entry.begin != prod(entry.shape) * item_bytes:
            raise CheckpointError(
                path,
                f'tensor "{name}": {entry.end - entry.begin} bytes do not hold {entry.dtype} {list(entry.shape)}',
                "the file is damaged: download it again",
            )
        if entry.begin != expected:
            raise CheckpointError(
                path,
                f'tensor "{name}" begins at byte {entry.begin}, where {expected} is due',
                "the file is damaged: download it again",
            )
        expected = entry.end
    if expected != file_bytes:
        raise CheckpointError(
            path,
            f"is truncated or longer than it should be: {file_bytes} bytes, its header says {expected}",
            "compare its size and download it again",
        )
