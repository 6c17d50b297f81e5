"""Sets up .venv: `python -m scripts.set_up up` with what serving needs, `dev` with the tests' tools as well.

    .venv as it should be?  -> nothing to do
    pip of the locked version -> what would come, and its size -> said -> installed -> noted in .venv/coppice.json

All versions are those of constraints.txt. The build of torch is pip's choice, or that of TORCH_PIP_ARGS: a build for
CPUs where there is no GPU and an index has one. A run that was stopped goes on from what pip has fetched.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.pip_plan import Plan, check_room, is_offered, plan
from scripts.pip_runs import Failed, Meter, hint, pip, run, say

ROOT = Path(__file__).resolve().parent.parent
LOCK = "constraints.txt"
KINDS = {"up": "what serving needs", "dev": "what serving and tests need"}
INTERRUPTED = 130
OLDEST = (3, 11)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. `python_is_given`: by hand, so that an environment of another Python will not do."""

    kind: str
    python_is_given: bool
    torch_arguments: str


def wanted_digest(root: Path) -> str:
    """Changes when something else has to be installed, not with every edit of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    parts = [project["build-system"], project["project"], project["tool"]["hatch"]]
    text = json.dumps(parts, sort_keys=True) + (root / LOCK).read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def locked_version(root: Path, name: str) -> str:
    found = re.search(rf"^{name}==(\S+)", (root / LOCK).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{LOCK} does not lock {name}"
    return found[1]


class Environment:
    """.venv and its note of how it was made and what is in it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self._note = self.folder / "coppice.json"

    def note(self) -> dict[str, Any]:
        try:
            read = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    def write_note(self, **changed: Any) -> None:
        """Replaced as a whole: an interrupted run leaves the old one."""
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps({**self.note(), **changed}, indent=1), encoding="utf-8")
        new.replace(self._note)

    def is_ready(self, wish: Wish, digest: str) -> bool:
        note = self.note()
        installed = note.get("installed", {})
        is_there = digest in (installed.get(wish.kind), installed.get("dev"))
        return is_there and not self.fault(wish)

    def fault(self, wish: Wish) -> str | None:
        """Why it must be made anew; None if it will do."""
        note = self.note()
        version = self.python_version()
        if version is None:
            return "is incomplete"
        if not os.access(self.python, os.X_OK):
            return "has lost its Python"
        if note.get("folder", str(self.folder)) != str(self.folder):
            return "was moved here"
        if version < OLDEST:
            return f"has Python {version[0]}.{version[1]}"
        if wish.python_is_given and version != sys.version_info[:2]:
            return f"has Python {version[0]}.{version[1]}, not {sys.version_info[0]}.{sys.version_info[1]}"
        if wish.torch_arguments and wish.torch_arguments != note.get("torch_arguments", wish.torch_arguments):
            return "has a torch of other TORCH_PIP_ARGS"
        return None

    def python_version(self) -> tuple[int, int] | None:
        try:
            configuration = (self.folder / "pyvenv.cfg").read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"^version(?:_info)? *= *(\d+)\.(\d+)", configuration, re.MULTILINE)
        return (int(found[1]), int(found[2])) if found else None

    def is_ours(self) -> bool:
        marks = (self._note, self.folder / ".installed")
        return any(mark.exists() for mark in marks) or not (self.folder / "pyvenv.cfg").exists()

    def site_packages(self) -> Path:
        version = self.python_version()
        assert version is not None
        return self.folder / "lib" / f"python{version[0]}.{version[1]}" / "site-packages"

    def has(self, name: str, version: str) -> bool:
        """Whether a version is installed, of whatever build."""
        return any(self.site_packages().glob(f"{name}-{version}[+.]*dist-info"))

    def count_installed(self) -> int:
        return sum(1 for _ in self.site_packages().glob("*.dist-info"))

    def forget_half_installed(self) -> None:
        """What an interrupted pip wrote without its list of files counts as not installed."""
        for folder in self.site_packages().glob("*.dist-info"):
            if not (folder / "RECORD").exists():
                shutil.rmtree(folder)
        for folder in self.site_packages().glob("~*"):
            shutil.rmtree(folder, ignore_errors=True)


def make_environment(environment: Environment, wish: Wish, fault: str) -> None:
    """Anew, with the Python that runs this, or the one behind it if that is the .venv which goes."""
    python: str = getattr(sys, "_base_executable", sys.executable)
    version = ".".join(map(str, sys.version_info[:3]))
    for module in ("venv", "ensurepip"):
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            raise Failed(
                f"Python {version} has no {module} module (Debian, Ubuntu: apt-get install"
                f" python{sys.version_info[0]}.{sys.version_info[1]}-venv); or name another Python: PYTHON=PATH."
            )
    if environment.folder.exists():
        if environment.folder.is_symlink():
            raise Failed(f".venv {fault}, and it is a link to {environment.folder.resolve()}: remove the link.")
        if not environment.is_ours():
            raise Failed(f".venv {fault}, and something else made it: move it away or remove it.")
        say(f".venv {fault}: it is made anew with Python {version}.")
    command = [python, "-m", "venv", "--clear", str(environment.folder)]
    status, output = run(command, Meter("making .venv", {}))
    if status:
        say(output)
        raise Failed(hint(output))
    environment.write_note(folder=str(environment.folder), torch_arguments=wish.torch_arguments)


def torch_requirement(environment: Environment, root: Path, version: str, has_gpu: bool) -> list[str]:
    """Without a GPU, a CPU build: by name if an index of pip's has one, else where PyTorch publishes it; otherwise
    whatever pip finds."""
    if environment.has("torch", version) or has_gpu or sys.platform != "linux":
        return []
    cpu = f"torch=={version}+cpu"
    if is_offered(environment.python, ["--no-deps", cpu]):
        return [cpu]
    if platform.machine() == "x86_64":  # the usual index has builds for CUDA alone there
        install_cpu_torch(environment, root, version)
    return []


def install_cpu_torch(environment: Environment, root: Path, version: str) -> None:
    """From PyTorch's own index, which uv knows. Where that does not answer, nothing has changed."""
    uv = f"uv=={locked_version(root, 'uv')}"
    pip(environment.python, ["install", "--no-deps", uv], Meter("installing uv, which knows PyTorch's index", {}))
    say(f"PyTorch {version}: a build for CPUs from PyTorch's own index, about 200 MB.")
    asked = ["--torch-backend", "cpu", "--no-deps", f"torch=={version}"]
    command = [str(environment.python), "-m", "uv", "pip", "install", "--python", str(environment.python), *asked]
    if run(command, Meter("installing PyTorch", {}))[0]:
        say("  That index does not answer; now for what pip finds.")


def say_plan(wanted: Plan, has_gpu: bool) -> None:
    torch = wanted.torch
    if torch is not None:
        say(f"PyTorch {torch.version}: {build_text(torch.version, wanted.has_cuda, has_gpu)}")
    if wanted.packages:
        say(f"{wanted.text()}.")


def build_text(version: str, has_cuda: bool, has_gpu: bool) -> str:
    is_cuda = has_cuda or "+cu" in version
    if is_cuda and not has_gpu:
        return (
            "a build for CUDA, and there is no GPU here (no nvidia-smi). It serves from the CPU as well.\n"
            "  A CPU build is about 200 MB in place of some 2.7 GB. To have one, press Ctrl-C and run\n"
            '    make up TORCH_PIP_ARGS="--index-url URL"\n'
            "  with the URL of PyTorch's CPU builds, which its installation page names."
        )
    if "+cpu" in version and has_gpu:
        return (
            "a build for CPUs, though there is a GPU here. The worker will not use it.\n"
            '  For CUDA, press Ctrl-C and run make up TORCH_PIP_ARGS="--index-url URL" with an index of CUDA builds.'
        )
    return "a build for CUDA." if is_cuda else "a build for CPUs." if "+cpu" in version else "the index's only build."


def install(environment: Environment, wish: Wish, wanted: Plan, has_gpu: bool, arguments: list[str]) -> None:
    """Exactly what was planned and said; pip need not decide again."""
    say_plan(wanted, has_gpu)
    check_room(wanted, shutil.disk_usage(environment.folder).free)
    pins = [f"{package.name}=={package.version}" for package in wanted.packages]
    meter = Meter("installing", wanted.sizes, environment.count_installed)
    pip(environment.python, ["install", "--no-deps", "--progress-bar", "raw", *arguments, *pins], meter)


def fill(environment: Environment, wish: Wish, root: Path) -> None:
    """torch first where it has arguments of its own: they must not choose where everything else comes from."""
    lock = root / LOCK
    has_gpu = shutil.which("nvidia-smi") is not None
    environment.forget_half_installed()
    pip_version, torch_version = locked_version(root, "pip"), locked_version(root, "torch")
    if not environment.has("pip", pip_version):
        pip(environment.python, ["install", f"pip=={pip_version}"], Meter("asking the package index", {}))
    torch_arguments = shlex.split(environment.note().get("torch_arguments", ""))
    if torch_arguments and not environment.has("torch", torch_version):
        wanted = plan(environment.python, ["--no-deps", *torch_arguments, f"torch=={torch_version}"])
        install(environment, wish, wanted, has_gpu, torch_arguments)
    torch = torch_requirement(environment, root, torch_version, has_gpu)
    locked = ["-c", str(lock), "--build-constraint", str(lock)]
    project = ["--editable", f"{root}[{wish.kind}]"]
    wanted = plan(environment.python, [*locked, *torch, *project])
    install(environment, wish, wanted, has_gpu, ["--build-constraint", str(lock), *project])
    say_missing_compiler(has_gpu)


def say_missing_compiler(has_gpu: bool) -> None:
    """Kernels for CPUs are C++; for each kernel on a GPU Triton compiles a small launcher in C when it first runs."""
    if not has_gpu:
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            say("There is no C++ compiler: serving will be slower without (Debian, Ubuntu: apt-get install g++).")
        return
    named = os.environ.get("CC")
    has_compiler = any(map(shutil.which, [named] if named else ("gcc", "clang")))  # Triton looks for no others
    if not has_compiler or not Path(sysconfig.get_path("include"), "Python.h").exists():
        say(
            "Triton will need a C compiler and Python's headers on the GPU"
            " (Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev)."
        )


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Two of these at once would write over each other."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another make sets up .venv: waiting for it.")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def set_up(wish: Wish, root: Path) -> None:
    environment = Environment(root)
    digest = wanted_digest(root)
    if environment.is_ready(wish, digest):
        return
    with alone(root):
        if environment.is_ready(wish, digest):
            return
        fault = environment.fault(wish)
        if fault is not None:
            make_environment(environment, wish, fault)
        version = environment.python_version()
        assert version is not None
        say(f"Setting up .venv with Python {version[0]}.{version[1]}: {KINDS[wish.kind]}.")
        if "folder" not in environment.note():
            environment.write_note(folder=str(environment.folder), torch_arguments=wish.torch_arguments)
        fill(environment, wish, root)
        installed = {"up": digest} if wish.kind == "up" else {"up": digest, "dev": digest}
        environment.write_note(installed={**environment.note().get("installed", {}), **installed})
        say(".venv is ready.")


def main(arguments: list[str], root: Path) -> int:
    """The exit code: 0 if .venv is as it should be, 1 with a line that says what to do, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="sets up .venv")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--python-is-given", action="store_true")
    parser.add_argument("--torch-arguments", default="")
    given = parser.parse_args(arguments)
    try:
        set_up(Wish(given.kind, given.python_is_given, given.torch_arguments.strip()), root)
    except Failed as failure:
        say(f"make: {failure}")
        return 1
    except KeyboardInterrupt:
        say("\nStopped. The same command goes on from here.")
        return INTERRUPTED
    except OSError as error:
        say(f"make: {error}. {hint(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], ROOT))
