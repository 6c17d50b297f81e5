"""How the processes of `coppice bench split` are told what to do: JSON lines on stdin, one JSON line back for each.

A process ends when its standard input does, so none outlives who started it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from coppice_bench.split.load import Load, Measured


def serve_commands(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line until the input ends. The first line out says that the process is ready."""
    say({"ready": True})
    for line in sys.stdin:
        say(handle(json.loads(line)))


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def load_to_line(load: Load) -> dict[str, Any]:
    return asdict(load)


def measured_from_line(line: dict[str, Any]) -> Measured:
    return Measured(**line)
