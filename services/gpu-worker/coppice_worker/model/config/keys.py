"""JSON objects with typed look-ups whose errors name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coppice_worker.model.config.errors import CheckpointError

LAYERS_MAX = 1 << 12


class Keys:
    """One object of a file."""

    def __init__(self, file: Path, values: Mapping[str, Any], inside: str = "") -> None:
        self.file = file
        self.values = values
        self._inside = inside

    def error(self, key: str, problem: str, advice: str) -> CheckpointError:
        return CheckpointError(self.file, f'"{self._inside}{key}": {problem}', advice)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Keys:
        """What is not there is as `defaults` say; null is there."""
        return Keys(self.file, {**defaults, **self.values}, self._inside)

    def inside(self, key: str) -> Keys:
        value = self.values.get(key)
        if value is None:
            return Keys(self.file, {}, f"{key}.")
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, found {value!r}", "correct the file")
        return Keys(self.file, value, f"{key}.")

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, f"expected a positive whole number, found {value!r}", "correct the file")
        return value

    def num_layers(self) -> int:
        """Of the decoder. Lists of this length are made before any weight is looked for."""
        count = self.positive_int("num_hidden_layers")
        if count > LAYERS_MAX:
            raise self.error("num_hidden_layers", f"found {count}", f"at most {LAYERS_MAX} are served")
        return count

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"expected a positive number, found {value!r}", "correct the file")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}", "correct the file")
        return value

    def int_or_none(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.positive_int(key)

    def float_or_none(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.positive_float(key)

    def _present(self, key: str, default: float | None) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise self.error(key, "is missing", "copy the model's complete config.json beside its weights")
        return default if value is None else value


def read_keys(file: Path) -> Keys:
    """Raises CheckpointError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(file, "no such file", "point at a folder with config.json and *.safetensors") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(file, f"cannot be read as JSON ({cause})", "download the file again") from cause
    if not isinstance(value, dict):
        raise CheckpointError(file, "holds no JSON object", "download the file again")
    return Keys(file, value)
