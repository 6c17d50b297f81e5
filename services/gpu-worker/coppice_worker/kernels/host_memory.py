"""Memory of this machine in huge pages, for what is larger than the tables that find pages quickly."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_PAGE = 2 << 20  # bytes


def zeros_in_huge_pages(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 zeros that begin with a page; as far as the system has such pages. It takes them when they are
    first written."""
    size = -(-num_bytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + num_bytes]
