"""`make compiled`: the cores of the cache service and of the scheduler, compiled by mypyc into `_compiled` beside them.

    python -m scripts.compile_cores              both
    python -m scripts.compile_cores scheduler    this one

`coppice/compiled.py` says when they are taken. A build appears at once, when all of it is there; if the source has
changed meanwhile, it does not appear.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from coppice.compiled import FOLDER, MADE_OF, digest
from coppice.errors import CoppiceError, UnavailableError, run_main

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "cache": Path("services/cache/coppice_cache"),
    "scheduler": Path("services/scheduler/coppice_scheduler"),
}
# What msgspec makes of a class it takes from annotations and keywords of the class, of which mypyc leaves neither.
_RECORDS = ("Record", "Message", "Struct")
# With -O3 -g gcc takes minutes: docs/decisions/0059-compiled-cores.md.
OPTIMISED, DEBUG_SYMBOLS = "1", "0"


def compile_core(package: Path, target: Path, made: Path) -> None:
    """`package` is a service's, in this checkout, `target` itself or a copy of it that gets the build, `made` a folder
    for what comes in between. Raises CoppiceError, and SystemExit for what mypyc refuses."""
    before = digest(package)
    run_mypyc(package, made)
    if not before == digest(package) == digest(target):
        raise CoppiceError(f"the source of {package.name} changed while it was compiled", hint="do it again")
    put(made / "lib" / package.name, target, before)


def run_mypyc(package: Path, made: Path) -> None:
    """Extension modules of what is compiled of the core, in `made/lib`."""
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.errors import BaseError
    except ImportError as error:
        raise UnavailableError(f"{error.name} is not installed", hint="make venv") from error
    modules = [str(path) for path in sorted((package / "core").rglob("*.py")) if not stays_source(path)]
    with contextlib.chdir(ROOT):  # where mypy finds its settings
        extensions = mypycify(
            # What cores import is looked into, and judged elsewhere: where an image is made, not all of it is there.
            [f"--cache-dir={os.devnull}", "--follow-imports=silent", *modules],
            opt_level=OPTIMISED,
            debug_level=DEBUG_SYMBOLS,
            target_dir=str(made / "c"),
            group_name=f"{package.name}.core",  # of the library that holds them all, and is looked for as a module
        )
        command = Distribution({"name": package.name, "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(made / "lib"), str(made / "o")
        command.ensure_finalized()
        try:
            command.run()
        except (BaseError, OSError) as error:
            hint = "a C compiler and Python's headers are needed: apt-get install gcc libc6-dev python3-dev"
            raise UnavailableError(f"the C compiler failed: {error}", hint=hint) from error


def stays_source(path: Path) -> bool:
    """Modules of a core that are taken as they are. Raises CoppiceError for one that can be neither."""
    if path.name == "__init__.py":
        return True
    classes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)]
    if any(isinstance(base, ast.Name) and base.id in _RECORDS for each in classes for base in each.bases):
        return True
    for each in classes:
        if each.keywords:
            raise CoppiceError(f"{path}: class {each.name} has keywords, which mypyc leaves out", hint="do without")
    return False


def put(library: Path, package: Path, made_of: str) -> None:
    """Make `library` the compiled core of the package, instead of the one that is there."""
    new, old = (package / f"{FOLDER}.{word}-{os.getpid()}" for word in ("new", "old"))
    try:
        shutil.copytree(library, new)
        for file in (package / "core").rglob("*.py"):
            if stays_source(file):
                shutil.copy(file, new / file.relative_to(package))
        (new / MADE_OF).write_text(made_of)
        with contextlib.suppress(FileNotFoundError):
            (package / FOLDER).rename(old)
        new.rename(package / FOLDER)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_cores", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("services", nargs="*", metavar="SERVICE", help=f"of {', '.join(PACKAGES)}; all unless given")
    services = parser.parse_args(argv).services or list(PACKAGES)
    for service in services:
        if service not in PACKAGES:
            parser.error(f"{service!r} is none of {', '.join(PACKAGES)}")
    for service in services:
        package = ROOT / PACKAGES[service]
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="coppice-compiled-") as made:
            compile_core(package, package, Path(made))
        print(f"{service}: compiled in {time.monotonic() - began_s:.0f} s, in {package / FOLDER}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("compile_cores", main))
