"""Names and values through which the ranks of gloo and NCCL find each other. Values are bytes that nobody here reads.

`torch.distributed` comes with a server for it, TCPStore, that listens on all addresses and takes whoever comes. Here
the values lie with rank 0, and other ranks ask over their links:

    | number u32 | msgpack: [operation, operands...] |   ->   | number u32 | msgpack: value |

`get` and `wait` are answered when all that they name is there, which keeps no thread waiting.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgpack
from torch._C._distributed_c10d import Store

from coppice_worker.parallel.errors import LinkLost
from coppice_worker.parallel.nodes.link import Kind, Link

KEYS_MAX = 65_536
KEY_CHARACTERS_MAX = 1024
VALUE_BYTES_MAX = 1 << 20
WAITING_MAX = 1024
TIMEOUT_S = 900.0  # ranks that load from a slow disk come late
_NUMBER = struct.Struct("<I")
Answered = Callable[[Any], None]


class StoreFull(Exception):
    """More than any meeting needs."""


class MeetingValues:
    """At rank 0. Any thread; what answers an ask is called with the lock held, and waits for nothing."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Sequence[str], Callable[[], None]]] = []
        self._lock = threading.RLock()

    def ask(self, operation: str, operands: Sequence[Any], answered: Answered) -> None:
        """`answered` gets the value, perhaps later. Raises StoreFull, ValueError for what is no operation."""
        with self._lock:
            match operation, *operands:
                case "set", str(key), bytes(value):
                    self._set(key, value)
                    answered(None)
                case "add", str(key), int(amount):
                    total = int(self._values.get(key, b"0")) + amount
                    self._set(key, str(total).encode())
                    answered(total)
                case "compare_set", str(key), bytes(expected), bytes(desired):
                    found = self._values.get(key)
                    if found == expected or (found is None and not expected):
                        self._set(key, desired)
                    answered(self._values.get(key, expected))
                case "check", [*keys]:
                    answered(all(key in self._values for key in keys))
                case "delete", str(key):
                    answered(self._values.pop(key, None) is not None)
                case ("count",):
                    answered(len(self._values))
                case "get", [*keys]:
                    self._when_there(keys, lambda: answered([self._values.get(key, b"") for key in keys]))
                case _:
                    raise ValueError(f"{operation!r} is no operation of the store")

    def serve(self, link: Link) -> None:
        """Answer what the rank at the other end asks; before the link runs."""

        def ask(message: bytes) -> None:
            number = message[: _NUMBER.size]
            try:
                operation, *operands = msgpack.unpackb(message[_NUMBER.size :])
                self.ask(operation, operands, lambda value: link.send(Kind.ANSWER, number + msgpack.packb(value)))
            except (ValueError, TypeError, StoreFull) as error:
                raise LinkLost(f"it asked the store for what cannot be had: {error}") from error

        link.on(Kind.ASK, ask)

    def _set(self, key: str, value: bytes) -> None:
        if len(value) > VALUE_BYTES_MAX or len(key) > KEY_CHARACTERS_MAX:
            raise StoreFull(f"a value of {len(value)} bytes under a key of {len(key)} characters")
        if len(self._values) >= KEYS_MAX and key not in self._values:
            raise StoreFull(f"{KEYS_MAX} values are there")
        self._values[key] = value
        there = [(keys, answer) for keys, answer in self._waiting if all(one in self._values for one in keys)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in there]
        for _, answer in there:
            answer()

    def _when_there(self, keys: Sequence[str], answer: Callable[[], None]) -> None:
        if all(key in self._values for key in keys):
            answer()
        elif len(self._waiting) >= WAITING_MAX:
            raise StoreFull(f"{WAITING_MAX} asks wait")
        else:
            self._waiting.append((keys, answer))


class StoreOverLink:
    """At another rank: asks over its link. Any thread but the link's."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next = 0
        self._answered: dict[int, Answered] = {}
        self._lock = threading.Lock()
        link.on(Kind.ANSWER, self._take)

    def ask(self, operation: str, operands: Sequence[Any], answered: Answered) -> None:
        with self._lock:
            self._next = number = (self._next + 1) % (1 << 32)
            self._answered[number] = answered
        self._link.send(Kind.ASK, _NUMBER.pack(number) + msgpack.packb([operation, *operands]))

    def _take(self, message: bytes) -> None:
        (number,) = _NUMBER.unpack_from(message)
        with self._lock:
            answered = self._answered.pop(number, None)
        if answered is not None:
            answered(msgpack.unpackb(message[_NUMBER.size :]))


class MeetingStore(Store):
    """What gloo and NCCL are given. Raises TimeoutError where a value does not come."""

    def __init__(self, ask: Callable[[str, Sequence[Any], Answered], None], timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self._ask = ask
        self._timeout = timedelta(seconds=timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        self._call("set", key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        found: bytes = self._call("get", [key])[0]
        return found

    def add(self, key: str, amount: int) -> int:
        total: int = self._call("add", key, amount)
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        texts = [text.encode() if isinstance(text, str) else text for text in (expected, desired)]
        found: bytes = self._call("compare_set", key, *texts)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def num_keys(self) -> int:
        return int(self._call("count"))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._call("get", list(keys), timeout=timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> MeetingStore:
        return self

    def _call(self, operation: str, *operands: Any, timeout: timedelta | None = None) -> Any:
        there = threading.Event()
        found: list[Any] = []

        def answered(value: Any) -> None:
            found.append(value)
            there.set()

        self._ask(operation, operands, answered)
        wait_s = (timeout or self._timeout).total_seconds()
        if not there.wait(wait_s):
            raise TimeoutError(f"no rank gave {operands[:1]} within {wait_s:.0f} s")
        return found[0]
