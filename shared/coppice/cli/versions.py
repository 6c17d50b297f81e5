"""Versions of what runs here."""

from __future__ import annotations

import platform
from importlib import metadata

from coppice import __version__

_PACKAGES = ("torch", "triton", "tokenizers", "grpcio", "fastapi")


def versions() -> dict[str, str]:
    """Version by name, of Coppice, Python and the packages that computing and serving rest on, where installed."""
    found = {"coppice": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
