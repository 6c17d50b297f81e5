"""Bytes of memory per cached token, measured in a process that does nothing else.

    python -m coppice_bench.index.memory sequences|leaves NUMBER

The difference in resident memory between before the core was made and after everything is cached: trees, ledger,
quotas, order of eviction, what the process keeps besides. Prints one JSON line.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from coppice.errors import EXIT_INTERRUPTED, CoppiceError
from coppice.ids import TOKEN_BYTES
from coppice_bench.index.core_driver import CoreDriver
from coppice_bench.index.shape import BLOCK_SIZE, leaf_tokens, random_tokens
from coppice_bench.rpc.client import WORKER

_SEQUENCE_TOKENS = 2_048
_OPS_PER_TICK = 2_000


def measured(shape: str, number: int) -> dict[str, Any]:
    """In a child process. Raises CoppiceError."""
    command = [sys.executable, "-m", "coppice_bench.index.memory", shape, str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CoppiceError(f"the measurement of memory ended with {done.returncode}; see above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resident_bytes() -> int:
    """Of this process, after its free memory went back."""
    gc.collect()
    try:
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library: what it keeps back counts as ours
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_here(shape: str, number: int) -> dict[str, Any]:
    """Fill a pool that has just enough blocks."""
    source = random.Random(9)
    blocks_each = _SEQUENCE_TOKENS // BLOCK_SIZE if shape == "sequences" else 1
    spare = 2 * blocks_each
    CoreDriver(spare, BLOCK_SIZE).cache(bytes(BLOCK_SIZE * TOKEN_BYTES))  # whatever is loaded late is loaded now
    before = resident_bytes()
    driver = CoreDriver(number * blocks_each + spare, BLOCK_SIZE)
    for each in range(number):
        driver.cache(random_tokens(source, _SEQUENCE_TOKENS) if shape == "sequences" else leaf_tokens(each + 1))
        if each % _OPS_PER_TICK == 0:
            driver.core.heard_worker(WORKER, driver.now_ns)
            driver.core.tick(driver.now_ns)
            driver.core.take_effects()
    num_bytes = resident_bytes() - before
    cached_tokens = driver.core.stats().cached_blocks * BLOCK_SIZE
    return {"bytes_per_token": num_bytes / cached_tokens, "cached_tokens": cached_tokens, "bytes": num_bytes}


if __name__ == "__main__":
    try:
        print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]))))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
