"""What is installed: Python, packages, a compiler, a GPU that torch sees."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from coppice import compiled
from coppice.errors import UsageError
from coppice_cli.doctor.findings import Finding, fail, ok, warn

PYTHON_FIRST, PYTHON_LAST = (3, 11), (3, 13)
GPU_LOOK_S = 60.0
_WITH_CORES = {"coppice_cache": "cache", "coppice_scheduler": "scheduler"}
TRITON_COMPILERS = ("gcc", "clang")  # it looks for no others, unless CC names one
_EXTRA = "up"  # that `coppice up` needs
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?([^;]*)(?:;(.*))?")
_BOUND = re.compile(r"(>=|<|==)\s*([0-9][0-9.]*)")

_LOOK_AT_GPU = """
import json, torch
found = [] if not torch.cuda.is_available() else [
    [torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())
]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": found}))
"""


def check_python(version: Sequence[int] = tuple(sys.version_info[:3])) -> Finding:
    said = ".".join(map(str, version[:3]))
    if not PYTHON_FIRST <= tuple(version[:2]) <= PYTHON_LAST:
        return fail("Python", said, "use 3.11, 3.12 or 3.13")
    return ok("Python", f"{said} on {platform.system()} {platform.machine()}")


def check_packages(
    requires: Callable[[], list[str] | None] = lambda: metadata.requires("coppice"),
    version_of: Callable[[str], str] = metadata.version,
) -> Iterable[Finding]:
    """What is missing or of another version than Coppice asks for; one finding if all is well."""
    try:
        asked = requires() or []
    except metadata.PackageNotFoundError:
        yield warn(
            "packages", "coppice is not installed here, so its requirements are not known", "pip install -e '.[up]'"
        )
        return
    wrong, count = 0, 0
    for line in asked:
        parsed = _REQUIREMENT.match(line)
        assert parsed is not None, line
        name, bounds, marker = parsed[1], parsed[2], parsed[3] or ""
        if not _counts(marker):
            continue
        count += 1
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            wrong += 1
            yield fail(f"package {name}", "is not installed", "pip install 'coppice[up]', or make venv in a checkout")
            continue
        if not _fits(version, bounds):
            wrong += 1
            to_do = "pip install --upgrade 'coppice[up]', or make venv in a checkout"
            yield fail(f"package {name}", f"{version} is installed, {bounds.strip()} is asked for", to_do)
    if not wrong:
        yield ok("packages", f"all {count} are of versions that Coppice asks for")


def _counts(marker: str) -> bool:
    """Of markers we have two kinds: an extra, and Linux alone."""
    if "extra" in marker and f"extra == '{_EXTRA}'" not in marker.replace('"', "'"):
        return False
    return "Linux" not in marker or platform.system() == "Linux"


def _fits(version: str, bounds: str) -> bool:
    found = _numbers(version)
    for sign, bound in _BOUND.findall(bounds):
        limit = _numbers(bound)
        longest = max(len(found), len(limit))
        ours, theirs = ((*each, *[0] * (longest - len(each))) for each in (found, limit))
        if not {">=": ours >= theirs, "<": ours < theirs, "==": ours == theirs}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Of `2.13.0+cpu` 2, 13, 0."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def check_compiler(*, has_gpu: bool, which: Callable[[str], str | None] = shutil.which, include: str = "") -> Finding:
    """A GPU's kernels need C and Python's headers, those of a CPU C++."""
    if not has_gpu:
        compiler = which(os.environ.get("CXX", "g++"))
        if compiler is None:
            to_do = "apt-get install g++, or name one with CXX"
            return warn("compiler", "there is no C++ compiler: computing on the CPU is slower without", to_do)
        return ok("compiler", f"{compiler}, for kernels on the CPU")
    named = os.environ.get("CC")
    compiler = next(filter(None, map(which, [named] if named else TRITON_COMPILERS)), None)
    header = Path(include or sysconfig.get_path("include"), "Python.h")
    to_do = "apt-get install gcc libc6-dev python3-dev"
    if compiler is None:
        what = f"CC names {named}, which is not there" if named else "there is neither gcc nor clang"
        return fail("compiler", f"{what}: Triton needs a C compiler on a GPU", to_do)
    if not header.exists():
        return fail("compiler", f"{header} is not there, which Triton needs on a GPU", to_do)
    return ok("compiler", f"{compiler} and {header}, for kernels on the GPU")


def _folder_of(package: str) -> Path | None:
    """Nothing is imported."""
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def check_cores(folder_of: Callable[[str], Path | None] = _folder_of) -> Iterable[Finding]:
    """Whether the services that are installed here run compiled cores."""
    try:
        wanted = compiled.wanted()
    except UsageError as error:
        yield fail("compiled cores", error.what, f"unset {compiled.VARIABLE}")
        return
    for package, service in _WITH_CORES.items():
        folder = folder_of(package)
        if folder is not None:
            yield _core(f"core of the {service}", wanted, compiled.build_of(folder))


def _core(subject: str, wanted: str, build: compiled.Build) -> Finding:
    if wanted == compiled.NEVER:
        return ok(subject, f"its source, as {compiled.VARIABLE} is {wanted}")
    if build is compiled.Build.CURRENT:
        return ok(subject, "compiled")
    if wanted == compiled.ALWAYS:
        return fail(subject, f"{compiled.VARIABLE} is {wanted}, and there is {build.value}", compiled.HINT)
    if build is compiled.Build.STALE:
        return warn(subject, f"its source, slower: there is {build.value}", compiled.HINT)
    return ok(subject, f"its source; there is {build.value}")


def check_gpu(program: str = _LOOK_AT_GPU, limit_s: float = GPU_LOOK_S) -> tuple[Finding, int]:
    """And how many there are. torch is imported in a process of its own: a broken driver may crash it, or hang."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        to_do = "see whether nvidia-smi answers; restart the driver, or say --device cpu"
        return fail("GPU", f"torch did not answer within {limit_s:.0f} s", to_do), 0
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        missing = "No module named 'torch'" in lines[-1]
        to_do = "pip install 'coppice[up]'" if missing else "see whether nvidia-smi answers, and reinstall torch"
        return fail("GPU", "torch is not installed" if missing else f"torch fails: {lines[-1]}", to_do), 0
    found = json.loads(done.stdout.splitlines()[-1])
    torch = f"torch {found['torch']}"
    if not found["gpus"]:
        if found["cuda"] is None:
            return warn(
                "GPU", f"{torch} is built without CUDA: workers compute on the CPU", "for a GPU install a CUDA build"
            ), 0
        to_do = "see nvidia-smi, CUDA_VISIBLE_DEVICES and whether the driver is new enough for that CUDA"
        return warn("GPU", f"{torch} for CUDA {found['cuda']} sees none: workers compute on the CPU", to_do), 0
    said = ", ".join(
        f"{name} ({free / 2**30:.1f} of {total / 2**30:.1f} GiB free)" for name, free, total in found["gpus"]
    )
    return ok("GPU", f"{said}; {torch}, CUDA {found['cuda']}"), len(found["gpus"])
