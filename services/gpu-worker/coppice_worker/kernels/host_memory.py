"""Memory of this machine in huge pages, for what is larger than the tables that find pages quickly."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from coppice.errors import UnavailableError

_PAGE = 2 << 20  # bytes


def zeros_in_huge_pages(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 zeros that begin with a page; as far as the system has such pages. It takes them when they are
    first written. Raises UnavailableError."""
    size = -(-num_bytes // _PAGE) * _PAGE
    try:
        memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UnavailableError(
            f"{size >> 20} MiB of memory cannot be had: {error.strerror or error}",
            hint="choose a smaller --kv-memory-mib, --num-blocks or --host-memory-mib",
        ) from error
    with suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + num_bytes]
