"""A block of KV as a file: its name says what should be in it, its head and checksum whether it is.

    name   0000010000030007-5f0c...9a              handle (block id and generation) and seal, in hex
           0000010000030007-5f0c...9a.part         not whole yet; worth nothing after a crash

    | magic 8 | handle 8 | seal 16 | length 8 | checksum 16 | zeros 8 |  KV, `length` bytes  |
    |<----------------------- head, 64 bytes ------------------------>|

The checksum is BLAKE2b-128 over the head's other fields and the KV. Whatever is cut, torn, mixed up or decayed has
another one, so a file is either what its name says or it is lost.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from coppice.seals import SEAL_BYTES

HEAD_BYTES = 64
PART = ".part"
_MAGIC = b"coppkv01"
_CHECKSUM_BYTES = 16
_HEAD = struct.Struct(f"<8sQ{SEAL_BYTES}sQ{_CHECKSUM_BYTES}s8x")
_NAME = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{{2 * SEAL_BYTES}}})")
_PRIVATE = 0o600
_UNREADABLE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # a bad sector, a damaged file system

assert _HEAD.size == HEAD_BYTES


class BlockName(NamedTuple):
    """Which occupancy of which block, and its content."""

    handle: int
    seal: bytes

    def __str__(self) -> str:
        return f"{self.handle:016x}-{self.seal.hex()}"


class NotWhole(Exception):
    """The file is not there, is not what its name says, or cannot be read any more."""


def parse_name(text: str) -> BlockName | None:
    match = _NAME.fullmatch(text)
    return None if match is None else BlockName(int(match[1], 16), bytes.fromhex(match[2]))


def write_block(folder: Path, name: BlockName, content: memoryview) -> None:
    """The file is whole, under its name and on the disk when this returns; its name is once the folder is synced.

    `content` has one dimension, of bytes. Raises OSError; then there is no file of that name.
    """
    part, whole = folder / f"{name}{PART}", folder / str(name)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE)
    try:
        _put(descriptor, memoryview(_head(name, content)))
        _put(descriptor, content)
        os.fdatasync(descriptor)
        _uncache(descriptor)
        os.rename(part, whole)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_block(folder: Path, name: BlockName, content: memoryview) -> None:
    """Fills `content`, a memory of as many bytes as the block has.

    Raises NotWhole, and OSError where the file may be right and cannot be read now; then `content` is garbage.
    """
    try:
        _read_block(folder, name, content)
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise NotWhole(str(error.strerror)) from error
        raise


def _read_block(folder: Path, name: BlockName, content: memoryview) -> None:
    try:
        descriptor = os.open(folder / str(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotWhole(str(error.strerror)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotWhole("it is a link") from error
        raise
    try:
        if os.fstat(descriptor).st_size != HEAD_BYTES + len(content):
            raise NotWhole("it has another length")
        head = bytearray(HEAD_BYTES)
        _fill(descriptor, memoryview(head))
        _fill(descriptor, content)
        _uncache(descriptor)
    finally:
        os.close(descriptor)
    if bytes(head) != _head(name, content):
        raise NotWhole("its checksum or its head is wrong")


def sync_folder(folder: Path) -> None:
    """What was named there before stays named so when the power fails. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _head(name: BlockName, content: memoryview) -> bytes:
    fields = (_MAGIC, name.handle, name.seal, len(content))
    checksum = blake2b(_HEAD.pack(*fields, bytes(_CHECKSUM_BYTES)), digest_size=_CHECKSUM_BYTES)
    checksum.update(content)
    return _HEAD.pack(*fields, checksum.digest())


def _put(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])


def _fill(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        got = os.readv(descriptor, (data[done:],))
        if not got:
            raise NotWhole("it ends early")
        done += got


def _uncache(descriptor: int) -> None:
    """Neither is read soon again: the memory is of more use to others."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
