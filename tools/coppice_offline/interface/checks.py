"""Values that a user gives, checked by type and range. Each check returns the plain value and raises UsageError."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from coppice.errors import UsageError
from coppice.messages.sampling import Range

_SHOWN_CHARS = 80


def wrong(name: str, value: Any, expected: str) -> UsageError:
    """The refusal of a value."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return UsageError(f"{name} is {shown}; it must be {expected}")


def integer(name: str, value: Any, allowed: Range) -> int:
    """NumPy's integers are integers, too; True and False are none."""
    if not is_integer(value) or not allowed.holds(value):
        raise wrong(name, value, f"an integer {allowed}")
    return int(value)


def number(name: str, value: Any, allowed: Range) -> float:
    if not _is_number(value) or not allowed.holds(value):
        raise wrong(name, value, f"a number {allowed}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def texts(name: str, value: Any) -> str | tuple[str, ...]:
    """A text, or several that are not empty."""
    if value is None or isinstance(value, str):
        return value or ()
    if not _is_collection(value) or not all(isinstance(each, str) and each for each in value):
        raise wrong(name, value, "a text, or several, none of them empty")
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Whether a model has them is checked where the model is known."""
    if value is None:
        return ()
    if not _is_collection(value) or not all(is_integer(each) for each in value):
        raise wrong(name, value, "a list of token ids")
    return tuple(int(each) for each in value)


def numbers_by_id(name: str, value: Any, allowed: Range) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        is_integer(key) and _is_number(each) and allowed.holds(each) for key, each in value.items()
    ):
        raise wrong(name, value, f"a mapping of token ids to numbers {allowed}")
    return {int(key): float(each) for key, each in value.items()}


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)
