"""A dict in parts, for a node with very many children: a dict that grows copies all it has, and that takes time.

With a million entries it is some 25 ms during which nothing else happens; here no part has more than a sixty-fourth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar
from zlib import crc32

SHARDED_FROM = 4_096  # entries; to share out so many takes 2 ms
_MASK = 63
Value = TypeVar("Value")
Keys = list[bytes] | dict[bytes, Any]  # a part of the keys; a dict is to be listed when its turn comes


class ShardedDict(Mapping[bytes, Value]):
    """Keys are spread by a checksum, which does not differ from process to process like `hash`."""

    __slots__ = ("_count", "_parts")

    def __init__(self, entries: Mapping[bytes, Value]) -> None:
        self._parts: list[dict[bytes, Value]] = [{} for _ in range(_MASK + 1)]
        self._count = 0
        for key, value in entries.items():
            self[key] = value

    def get(self, key: bytes, default: Any = None) -> Any:
        return self._parts[crc32(key) & _MASK].get(key, default)

    def __getitem__(self, key: bytes) -> Value:
        return self._parts[crc32(key) & _MASK][key]

    def __setitem__(self, key: bytes, value: Value) -> None:
        part = self._parts[crc32(key) & _MASK]
        self._count += key not in part
        part[key] = value

    def __delitem__(self, key: bytes) -> None:
        del self._parts[crc32(key) & _MASK][key]
        self._count -= 1

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._parts[crc32(key) & _MASK]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._parts)

    def values(self) -> Any:
        return chain.from_iterable(part.values() for part in self._parts)

    def items(self) -> Any:
        return chain.from_iterable(part.items() for part in self._parts)


def key_parts(entries: Mapping[bytes, Any]) -> list[Keys]:
    """All keys, in parts none of which takes long to list."""
    return [*entries._parts] if isinstance(entries, ShardedDict) else [list(entries)]
