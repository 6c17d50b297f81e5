"""A JSON request body to Python values, with bounds, and typed reads of its fields.

Every read names the field in its error. `null` is the same as a field that is not there, as OpenAI has it. Of a body
that has several forms, all fields are read in each: one that is not would be taken with anything in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.base.json_size import check_json_size
from coppice_scheduler.edge.http.long_lists import parse_json

_ID = re.compile(r"[0-9]{1,10}\Z", re.ASCII)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError for anything but a JSON object of reasonable shape. NaN and Infinity are not JSON."""
    check_json_size([raw], "the body")
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return value


class Fields:
    """Typed reads of one JSON object. `prefix` names it in errors, such as `messages[2].`."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def assert_read(self, names: Iterable[str]) -> None:
        """That each of them was read, whether it is there or not. The last thing that is done with a body."""
        unread = set(names) - self._read
        assert not unread, f"taken without being read: {', '.join(sorted(unread))}"

    def wrong(self, name: str, expected: str) -> ApiError:
        found = _kind(self._values.get(name))
        return invalid(f"{self._prefix}{name} must be {expected}, not {found}.", param=f"{self._prefix}{name}")

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise invalid(f"{self._prefix}{name} is required.", param=f"{self._prefix}{name}", code="missing")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def json_object(self, name: str) -> str | None:
        """An object, as JSON."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return json_text(value, f"{self._prefix}{name}")

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is not None and type(value) not in (int, float):
            raise self.wrong(name, "a number")
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise self.wrong(name, "a number of reasonable size") from error

    def at_most(self, name: str, most: int, entries: str) -> Any:
        """A field whose length is looked at before its entries are. Raises ApiError."""
        value = self.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            message = f"{self._prefix}{name} has {len(value)} {entries}; at most {most} are taken"
            raise invalid(message, param=f"{self._prefix}{name}")
        return value

    def required_list(self, name: str, most: int, entries: str) -> list[Any]:
        """Raises ApiError for what is no list, and for one with more than `most` entries."""
        value = self.get(name)
        if value is None:
            raise invalid(f"{self._prefix}{name} is required.", param=f"{self._prefix}{name}", code="missing")
        if not isinstance(value, list):
            raise self.wrong(name, f"a list of {entries}")
        self.at_most(name, most, "entries")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self.at_most(name, most, "strings")
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a string or a list of strings")
        return tuple(value)

    def integers(self, name: str, most: int) -> tuple[int, ...]:
        value = self.at_most(name, most, "ids")
        if value is None:
            return ()
        if not isinstance(value, list) or set(map(type, value)) - {int}:
            raise self.wrong(name, "a list of integers")
        return tuple(value)

    def numbers_by_id(self, name: str, most: int) -> dict[int, float]:
        """An object of numbers whose keys are whole numbers, as JSON writes a map by token id."""
        value = self.at_most(name, most, "entries")
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(type(number) in (int, float) for number in value.values()):
            raise self.wrong(name, "an object of token ids and numbers")
        if not all(_ID.match(key) for key in value):
            raise invalid(f"{self._prefix}{name} has a key that is no token id.", param=f"{self._prefix}{name}")
        try:
            return {int(key): float(number) for key, number in value.items()}
        except OverflowError as error:
            raise self.wrong(name, "an object of numbers of reasonable size") from error


def json_text(value: dict[str, Any], where: str) -> str:
    """Raises ApiError that names `where`."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise invalid(f"{where} is nested too deeply.", param=where, code="too_complex") from None


def _kind(value: Any) -> str:
    for types, name in (
        (bool, "a boolean"),
        (str, "a string"),
        (int, "an integer"),
        (float, "a number"),
        (list, "a list with other entries" if value else "an empty list"),
        (dict, "an object"),
    ):
        if isinstance(value, types):
            return name
    return "null"
