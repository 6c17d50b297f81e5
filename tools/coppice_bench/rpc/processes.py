"""The other process of a measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coppice.errors import CoppiceError

_END_S = 30.0


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Ports and session addresses by name of `python -m module`, which prints them as one JSON line and ends with its
    input. Raises CoppiceError when it does not start."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CoppiceError("the serving process of the benchmark ended before it served; see above")
        yield json.loads(line)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
