"""In each Python process that finds this folder on PYTHONPATH, fresh tensors hold NaN and the largest integers.

`make flaky` runs tests, and whatever they start, so: what reads memory that nobody wrote fails each time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class PoisonedTorch:
    """Finds torch as everybody does, once, and has it fill what `torch.empty` and its like return."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.use_deterministic_algorithms(True, warn_only=True)  # of which filling is a part

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, PoisonedTorch())
