"""Imports one module of a peer and nothing of the engine around it.

The peers' index structures are plain Python or one extension module, but they live in packages whose imports load
whole engines. So a named handful of modules is imported for real; every other module of that package, and every
third-party module that is not installed, is a stand-in whose names are empty classes. Nothing that is timed may use a
stand-in: the adapters only call code of the modules that they name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class PeerMissing(Exception):
    """The peer is not installed here, or its modules no longer look as they did; says which and why."""


class _StandInMeta(type):
    """A class that can be subclassed, called, indexed, combined with `|` and asked for any name."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **_: Any) -> Any:
        return super().__new__(cls, name, bases, space)

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, space)

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "is_stand_in" not in cls.__dict__:
            return super().__call__(*args, **options)
        is_decorator = len(args) == 1 and not options and callable(args[0])
        return args[0] if is_decorator else _stand_in("result")

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _StandInMeta(name, (), {"is_stand_in": True})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of `package` that is not in `real`, and whatever was found missing elsewhere."""

    def __init__(self, package: str, site: Path, real: Sequence[str]) -> None:
        self._package = package
        self._site = site
        self._real = frozenset(real)
        self._parents = frozenset(
            name.rsplit(".", depth)[0] for name in real for depth in range(1, name.count(".") + 1)
        )
        self.missing: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        if (top == self._package and name not in self._real) or top in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        if spec.name in self._parents:
            module.__path__ = [str(self._site.joinpath(*spec.name.split(".")))]
        else:
            module.__path__ = []
            module.__getattr__ = _stand_in  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""

    def load(self, name: str) -> ModuleType:
        """Import, and put a stand-in for each third-party module that turns out to be missing. Raises PeerMissing."""
        while True:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                top = (error.name or "").split(".")[0]
                if not top or top == self._package or top in self.missing:
                    raise PeerMissing(f"{name} cannot be imported alone: {error}") from error
                self.missing.add(top)
            except (ImportError, AttributeError, TypeError, NameError) as error:
                raise PeerMissing(f"{name} cannot be imported alone: {error}") from error


def import_alone(site: Path, module: str, *others: str) -> list[ModuleType]:
    """Import `module` and `others` of one package unpacked in `site`; everything else of that package is a stand-in.

    Raises PeerMissing.
    """
    package = module.split(".")[0]
    if not (site / package).is_dir():
        raise PeerMissing(f"no folder {package} there")
    finder = _StandIns(package, site, (module, *others))
    sys.meta_path.insert(0, finder)
    try:
        return [finder.load(name) for name in (module, *others)]
    finally:
        sys.meta_path.remove(finder)
