"""Compiles C++ sources of this folder for this machine, once, into the user's cache folder.

The library shares torch's own OpenMP runtime: a second one would have a second set of threads, and two sets that wait
for work on the same cores are slower than one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def build(source: str, defines: tuple[str, ...] = ()) -> Path:
    """The library of `source` ("kernels.cpp") for these defines ("HEAD_DIM=64"), compiled unless it lies in the cache.

    Raises BuildError.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++, or what CXX names)")
    runtime = _openmp_runtime()
    flags = (*_FLAGS, *(f"-D{define}" for define in defines))
    texts = [path.read_bytes() for path in (_FOLDER / source, *sorted(_FOLDER.glob("*.h")))]
    parts = (*texts, *map(str.encode, (compiler, runtime, platform.machine(), "\n".join(_cpu_lines()), *flags)))
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coppice" / "kernels"
    library = folder / f"{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile([compiler, *flags, "-c", str(_FOLDER / source)], runtime, library)
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error
    return library


def _compile(command: list[str], runtime: str, library: Path) -> None:
    """Two processes may do so at once: each renames a whole file of its own."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run([*command, "-o", str(compiled)])
        _run([command[0], "-shared", str(compiled), runtime, "-o", str(linked)])
        linked.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BuildError(f"{command[0]} failed: " + next((line for line in lines if "error" in line), lines[-1]))


def _openmp_runtime() -> str:
    """Path of the libgomp that torch has loaded into this process."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError as error:
        raise BuildError(f"the OpenMP runtime of torch cannot be found: {error}") from error
    found = sorted({line.split(maxsplit=5)[-1] for line in mapped.splitlines() if "/libgomp" in line})
    if not found:
        raise BuildError("this torch has not loaded libgomp")
    # A library that this one was linked with before lies elsewhere only if there are two; torch's own is bundled.
    return next((path for path in found if "torch" in path), found[0])


def cpu_flags() -> frozenset[str]:
    """What the CPU can, as Linux names it; empty where that is not known."""
    lines = [line for line in _cpu_lines() if line.startswith(("flags", "Features"))]
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def cpu_vendor() -> str:
    """As Linux names it; empty where that is not known."""
    return next((line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("vendor_id")), "")


def _cpu_lines() -> list[str]:
    """What `-march=native` depends on; a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(wanted)})
