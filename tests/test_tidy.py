"""Style as a test: sizes, purity of cores, nothing of one machine, no pickle. Generated code is left alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("shared", "services", "tools", "tests", "demo", "benchmarks", "deploy", "docs", "models", "scripts")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".proto", ".txt", ".sh", ".cfg", ".Dockerfile", ""}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_FOLDER_FILES = 12  # side by side, without __init__.py
ROOM_FOLDERS = ("shared", "services", "tools", "tests", "benchmarks")
IMPURE = {
    *("asyncio", "concurrent", "datetime", "fastapi", "grpc", "logging", "multiprocessing", "os", "random", "redis"),
    *("requests", "secrets", "socket", "subprocess", "threading", "time", "torch", "triton", "uuid", "uvicorn"),
}
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
MACHINE_PATH = re.compile(r"""["'\s=(`:]/(?:wor[k]|roo[t]|hom[e]|tm[p]|Users)/""")


def is_generated(path: Path) -> bool:
    return "coppice_rpc" in path.parts and path.name != "__init__.py"


def python_files() -> list[Path]:
    found = [path for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not is_generated(path)]


def text_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    below = [path for folder in (*CODE_FOLDERS, ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [path for path in top + below if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts]
    return [path for path in kept if path.stat().st_size < 1 << 20]


def functions_too_long(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def imports_of(tree: ast.AST, refused: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in refused:
                yield node.lineno, f"imports {name}"


def unsafe_loads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`torch.load` unpickles; checkpoints here are safetensors."""
    for node in ast.walk(tree):
        is_load = isinstance(node, ast.Attribute) and node.attr == "load"
        if is_load and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, "calls torch.load"


def machine_paths(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(f" {line}"):
            yield number, f"names a folder of one machine: {line.strip()[:80]}"


def findings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [*functions_too_long(tree), *imports_of(tree, UNSAFE), *unsafe_loads(tree)]
    if "core" in path.relative_to(ROOT).parts[:-1]:
        found += imports_of(tree, IMPURE)
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append((1, f"has {num_lines} lines, at most {MAX_FILE_LINES}"))
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in found]


def test_files_and_functions_are_short_and_cores_are_pure() -> None:
    files = python_files()
    assert len(files) > 50, "the folders to look in have moved"
    assert not [finding for path in files for finding in findings(path)]


def test_no_room_is_crowded() -> None:
    files = [path for path in python_files() if path.relative_to(ROOT).parts[0] in ROOM_FOLDERS]
    sizes = Counter(path.parent.relative_to(ROOT) for path in files if path.name != "__init__.py")
    assert not {str(folder): size for folder, size in sizes.items() if size > MAX_FOLDER_FILES}


def test_nothing_names_a_folder_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in text_files()
        for line, text in machine_paths(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, functions_too_long),
        ("def f():\n    import time\n", lambda tree: imports_of(tree, IMPURE)),
        ("from os import path\n", lambda tree: imports_of(tree, IMPURE)),
        ("import pickle\n", lambda tree: imports_of(tree, UNSAFE)),
        ("torch.load('x')\n", unsafe_loads),
    ],
)
def test_the_checks_find_what_they_look_for(code: str, check: object) -> None:
    assert callable(check)
    assert list(check(ast.parse(code)))


@pytest.mark.parametrize("folder", ["work", "root", "home", "tmp"])
def test_a_machine_path_is_found(folder: str) -> None:
    assert list(machine_paths(f'open("/{folder}/x")'))
    assert not list(machine_paths(f"https://host/{folder}/x"))
