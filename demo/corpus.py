"""The text: what Python's standard library says about itself.

    *.py files ── ast ──► docstrings of modules, classes and functions, with signatures
               ── lines ► blocks of comments
    C modules  ── import ► docstrings of built-in functions, classes and methods
    pydoc      ──────────► language topics

Everything is visited in sorted order, so one Python build always gives the same documents; `digest` names them.
Tests, installed packages and files generated for one machine are left out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 4
TEXT_CHARS_MIN = 24
COMMENT_CHARS_MIN = 80
COMMENT_LINES_MIN = 2

# Tests say little in prose; the two data modules import nothing but tables; the rest is not the standard library.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "config", "lib-dynload"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "_test", "xx")

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of prose. `name` is dotted and empty for comments; `signature` is source text or empty."""

    name: str
    signature: str
    text: str
    origin: str

    @property
    def key(self) -> str:
        """SHA-256 (hex) of the text with case and white space removed: equal prose has an equal key."""
        return hashlib.sha256("".join(self.text.lower().split()).encode()).hexdigest()

    @property
    def is_held_out(self) -> bool:
        """Decided by the text alone, so it does not move when other documents come or go."""
        return int(self.key[:8], 16) % 100 < HELD_OUT_PERCENT


def collect(modules: Iterable[str] | None = None) -> list[Document]:
    """All documents of the running Python, each text once; `modules` limits it to these top-level modules."""
    chosen = None if modules is None else frozenset(modules)
    found: list[Document] = []
    for path in _source_files(Path(sysconfig.get_paths()["stdlib"]), chosen):
        found += documents_in_source(*path)
    for module_name in sorted(sys.stdlib_module_names):
        if chosen is None or module_name in chosen:
            found += _documents_in_extension(module_name)
    if chosen is None or "pydoc_data" in chosen:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
        found += [Document(name, "", _clean(topics[name]), "topic") for name in sorted(topics)]
    return _distinct(found)


def digest(documents: Iterable[Document]) -> str:
    """SHA-256 (hex) over names, signatures and texts in order: names one corpus exactly."""
    total = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.signature, document.text):
            encoded = part.encode("utf-8", "replace")
            total.update(len(encoded).to_bytes(4, "little") + encoded)
    return total.hexdigest()


def documents_in_source(module_name: str, source: str) -> Iterator[Document]:
    """Docstrings, then comment blocks, of one module's source text. A file that does not parse gives nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from _docstrings(module_name, tree)
    yield from _comment_blocks(source)


def _source_files(root: Path, chosen: frozenset[str] | None) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py"), key=lambda found: found.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.intersection(parts[:-1]) or any(part.startswith("config-") for part in parts):
            continue
        if parts[-1].startswith(_SKIPPED_PREFIXES) or (chosen is not None and parts[0] not in chosen):
            continue
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield dotted, path.read_text(encoding="utf-8", errors="replace")


def _docstrings(prefix: str, node: _Documented) -> Iterator[Document]:
    text = ast.get_docstring(node)
    if text:
        yield Document(prefix, _signature(node), _clean(text), "docstring")
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(f"{prefix}.{child.name}", child)


def _signature(node: _Documented) -> str:
    match node:
        case ast.ClassDef():
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"def {node.name}({ast.unparse(node.args)}):"
    return ""


def _comment_blocks(source: str) -> Iterator[Document]:
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#") and not stripped.startswith("#!"):
            block.append(stripped.lstrip("#").removeprefix(" ").rstrip())
            continue
        text = _clean("\n".join(block))
        if len(block) >= COMMENT_LINES_MIN and len(text) >= COMMENT_CHARS_MIN and _is_prose(text):
            yield Document("", "", text, "comment")
        block = []


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return letters >= 0.8 * len(text)


def _documents_in_extension(module_name: str) -> Iterator[Document]:
    if module_name.startswith(_SKIPPED_PREFIXES):
        return
    try:
        spec = importlib.util.find_spec(module_name)
        is_compiled = spec is not None and (
            spec.origin == "built-in" or isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)
        )
        if not is_compiled:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(module_name)
    except (ImportError, ValueError):
        return
    shown = module_name.removeprefix("_")
    yield from _documents_in_object(shown, module)
    for name in sorted(vars(module)):
        member = vars(module)[name]
        if not (isinstance(member, type) or inspect.isbuiltin(member)):
            continue
        yield from _documents_in_object(f"{shown}.{name}", member)
        if isinstance(member, type):
            for attribute in sorted(vars(member)):
                yield from _documents_in_object(f"{shown}.{name}.{attribute}", vars(member)[attribute])


def _documents_in_object(name: str, found: object) -> Iterator[Document]:
    text = getattr(found, "__doc__", None)
    if not isinstance(text, str) or isinstance(found, str | bytes | int | float | tuple | frozenset | dict | list):
        return
    arguments = getattr(found, "__text_signature__", None)
    last = name.rpartition(".")[2]
    signature = ""
    if isinstance(arguments, str) and not isinstance(found, type):
        signature = f"def {last}{_without_marks(arguments)}:"
    yield Document(name, signature, _clean(text), "C docstring")


def _without_marks(arguments: str) -> str:
    """CPython marks the bound first argument with `$`; a module's is no argument to a reader at all."""
    return re.sub(r"^\(\$module(, /)?(, )?", "(", arguments).replace("$", "")


def _clean(text: str) -> str:
    tidy = "\n".join(line.rstrip() for line in inspect.cleandoc(text.expandtabs()).splitlines())
    return re.sub(r"\n{3,}", "\n\n", tidy).strip().encode("utf-8", "replace").decode()


def _distinct(documents: Iterable[Document]) -> list[Document]:
    seen: set[str] = set()
    kept: list[Document] = []
    for document in documents:
        key = document.key
        if len(document.text) >= TEXT_CHARS_MIN and key not in seen:
            seen.add(key)
            kept.append(document)
    return kept
