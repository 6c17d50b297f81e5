"""Launches of Triton kernels on a machine without a GPU: all that the host does before the driver, and then nothing.

    with stand_in_driver():
        kernel[grid](...)       compiled for sm_90 the first time; tensors are the CPU's, and stay as they are

Triton asks its driver for the chip, the stream, a loaded binary and a launcher; the last two do nothing here. What a
launch costs the host on a device is this and the driver's own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from tests.kernels.compiled.sm90 import TARGET

SHARED_BYTES_MAX = 227 * 1024  # of a program of sm_90
THREADS_MAX = 1024


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads."""
        return 1, 1, 0, 0, THREADS_MAX


class StandInDriver:
    """Of a device of sm_90 that is not there."""

    utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *_: None


@contextmanager
def stand_in_driver() -> Iterator[None]:
    """Within it, no kernel computes anything."""
    with patch.object(triton.runtime.driver, "_active", StandInDriver()):
        yield
