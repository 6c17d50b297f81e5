"""What rank 0 tells the others to do, as bytes: what a command consists of in msgpack, then its arrays as they lie.

| header bytes uint32 | payload bytes uint64 | header | payload: arrays, each padded to 16 bytes |

header    None                           None
          a number                       itself
          an array                       [dtype, length, length, ...], one length per dimension
          one of `_CLASSES`              [its index, field, field, ...]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from coppice_worker.core.batch.guides import Guided
from coppice_worker.core.batch.step_batch import Int32, LogitChanges, PromptTokens, SampleRows, StepBatch
from coppice_worker.parallel.channels import Channel

_ALIGNMENT = 16
_SIZES = struct.Struct("<IQ")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    block_ids: Int32  # [N]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    src: Int32  # [N]
    dst: Int32  # [N]


@dataclass(frozen=True, slots=True)
class Demote:
    after: int  # commands of the steps' channel that must have been carried out
    src: Int32  # [N] blocks of the device
    dst: Int32  # [N] blocks of the host


@dataclass(frozen=True, slots=True)
class Promote:
    after: int  # as in `Demote`
    src: Int32  # [N] blocks of the host
    dst: Int32  # [N] blocks of the device


# Block tables of a `StepBatch` are those of `changed_tables` only, where that is given.
Command = ZeroBlocks | CopyBlocks | StepBatch | Demote | Promote

# By index on the wire: both ends run the same code.
_COMMANDS: tuple[type[Any], ...] = (ZeroBlocks, CopyBlocks, StepBatch, Demote, Promote)
_CLASSES = (*_COMMANDS, SampleRows, LogitChanges, PromptTokens, Guided)
_INDEX = {kind: index for index, kind in enumerate(_CLASSES)}
_NAMES = {kind: tuple(field.name for field in fields(kind) if not field.metadata.get("is_local")) for kind in _CLASSES}


def encode(command: Command) -> bytes:
    """The command's frame."""
    arrays: list[Array] = []
    header = msgpack.packb(_describe(command, arrays))
    parts: list[bytes] = []
    for array in arrays:
        parts += (array.tobytes(), bytes(-array.nbytes % _ALIGNMENT))
    payload = b"".join(parts)
    return b"".join((_SIZES.pack(len(header), len(payload)), header, payload))


def receive(channel: Channel) -> Command | None:
    """The next command, whose arrays may be written to; None when the other end is closed."""
    sizes = _read(channel, _SIZES.size)
    if sizes is None:
        return None
    header_bytes, payload_bytes = _SIZES.unpack(sizes)
    header, payload = _read(channel, header_bytes), _read(channel, payload_bytes)
    if header is None or payload is None:
        return None
    command: Command = _Reader(payload).value(msgpack.unpackb(header))
    return command


def _describe(value: Any, arrays: list[Array]) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return [value.dtype.str, *value.shape]
    kind = type(value)
    return [_INDEX[kind], *(_describe(getattr(value, name), arrays) for name in _NAMES[kind])]


def _read(channel: Channel, num_bytes: int) -> bytearray | None:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return received


class _Reader:
    """Builds values; their arrays are views of the payload."""

    def __init__(self, payload: bytearray) -> None:
        self._payload = payload
        self._offset = 0

    def value(self, described: Any) -> Any:
        match described:
            case [str(dtype), *shape]:
                return self._array(np.dtype(dtype), tuple(shape))
            case [int(index), *members]:
                return _CLASSES[index](*map(self.value, members))
        return described

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        array: Array = np.ndarray(shape, dtype, self._payload, self._offset)
        self._offset += array.nbytes + -array.nbytes % _ALIGNMENT
        return array
