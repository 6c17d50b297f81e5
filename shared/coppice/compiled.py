"""Compiled cores: what `scripts/compile_cores.py` made of a service's core, taken instead of the source.

    coppice_cache/core/             the source
    coppice_cache/_compiled/core/   the same modules, compiled but for records; beside it a digest of what they are of

A service's package looks for its modules in the second folder first, if COPPICE_COMPILED has it so:

    auto     where there is one, made of this very source for this Python; the default
    always   an error where there is none
    never    the source
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from enum import Enum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from coppice.errors import CoppiceError, UnavailableError, UsageError

VARIABLE = "COPPICE_COMPILED"
AUTO, ALWAYS, NEVER = "auto", "always", "never"
FOLDER = "_compiled"
MADE_OF = "made_of"  # in the folder
HINT = "make compiled, in a checkout with a C compiler"
PACKAGES = ("coppice_cache", "coppice_scheduler")
_SHARED = Path(__file__).parent


class Build(Enum):
    """What there is of a core beside its source."""

    NONE = "no compiled core"
    STALE = "a compiled core that was made of another source, or for another Python"
    CURRENT = "a compiled core"


def wanted() -> str:
    """Raises UsageError."""
    word = os.environ.get(VARIABLE) or AUTO
    if word not in (AUTO, ALWAYS, NEVER):
        raise UsageError(f"{VARIABLE} is {word!r}; give {AUTO}, {ALWAYS} or {NEVER}")
    return word


def build_of(package: Path) -> Build:
    try:
        made_of = (package / FOLDER / MADE_OF).read_text()
    except OSError:
        return Build.NONE
    try:
        return Build.CURRENT if made_of == digest(package) else Build.STALE
    except OSError:  # an editor's lock, or a file that is written just now
        return Build.STALE


def digest(package: Path) -> str:
    """Of the core's source, of the common package, whose types it is compiled for, and of which Python may load it."""
    made_of = hashlib.sha256(f"{EXTENSION_SUFFIXES[0]} {platform.machine()}".encode())
    for root in (package / "core", _SHARED):
        for file in sorted(root.rglob("*.py")):
            content = file.read_bytes()
            made_of.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return made_of.hexdigest()


def search_path(package: str, path: Iterable[str]) -> list[str]:
    """For `__path__` of a service's package. Raises UsageError, and UnavailableError where there must be a build."""
    try:
        return _search_path(package, list(path))
    except CoppiceError as error:
        if sys.argv[:1] != ["-m"]:
            raise
        # `python -m` is still looking for the module, which would make one line of it.
        print(f"python -m {package}: {error.line()}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def _search_path(package: str, places: list[str]) -> list[str]:
    word = wanted()
    if word == NEVER:
        return places
    build = build_of(Path(places[0]))
    if build is Build.CURRENT:
        return [str(Path(places[0], FOLDER)), *places]
    if word == ALWAYS:
        raise UnavailableError(f"{VARIABLE}={ALWAYS}, and {package} has {build.value}", hint=HINT)
    return places


def is_compiled(package: str) -> bool:
    """Of a service's package that has been imported."""
    return Path(sys.modules[package].__path__[0]).name == FOLDER


def kind_of(package: str) -> str:
    """The same, as logs say it."""
    return "compiled" if is_compiled(package) else "source"


def kinds() -> dict[str, str]:
    """Of all services' packages that have been imported."""
    return {package: kind_of(package) for package in PACKAGES if package in sys.modules}
