"""What runs here: versions and machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from coppice import __version__

_PACKAGES = ("torch", "triton", "tokenizers", "llguidance", "grpcio", "fastapi")


def versions() -> dict[str, str]:
    """Version by name, of Coppice, Python and the packages that computing and serving rest on, where installed."""
    found = {"coppice": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """For the end of a measurement: what it ran on."""
    return {
        "machine": {"system": platform.platform(), "cpu": _cpu_name(), "cores": os.cpu_count()},
        "versions": versions(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
