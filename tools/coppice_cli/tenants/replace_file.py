"""A file is replaced as a whole: readers have the old one or the new one, and of two editors the second waits.

lock of the folder --> read --> edit --> validate --> FILE.tmp, fsync --> still what was read? --> rename
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from coppice.errors import CoppiceError
from coppice.tenants.file import parse_tenants, read_tenants

_NEW_MODE = 0o640


def edit_tenants(path: Path, edit: Callable[[str], str], *, creates: bool = False) -> None:
    """Replace the file by what `edit` makes of its text. `creates`: one that is not there begins empty.

    Raises UsageError where the file or the result is wrong, CoppiceError where it cannot be replaced; the file is as it
    was then.
    """
    path = path.resolve()  # a link stays one
    with _locked(path):
        before = b"" if creates and not path.exists() else read_tenants(path)
        if before:
            parse_tenants(path, before)
        after = edit(before.decode("utf-8")).encode("utf-8")
        parse_tenants(path, after)
        _replace(path, before, after)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The folder's lock, as a rename gives the file's name to another file."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CoppiceError(f"cannot open the folder {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
        os.fsync(folder)
    finally:
        os.close(folder)


def _replace(path: Path, before: bytes, after: bytes) -> None:
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            _like(path, file.fileno())
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        if (path.read_bytes() if path.exists() else b"") != before:
            raise CoppiceError(f"{path} was changed by somebody else meanwhile", hint="nothing was written; try again")
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise CoppiceError(
            f"cannot replace {path}: {error.strerror}", hint="its folder must be writable; a mounted file cannot be"
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _like(path: Path, descriptor: int) -> None:
    """Mode and owner of the file that is there."""
    if not path.exists():
        os.fchmod(descriptor, _NEW_MODE)
        return
    found = path.stat()
    if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):  # as another user we keep the mode alone
            os.fchown(descriptor, found.st_uid, found.st_gid)
    os.fchmod(descriptor, found.st_mode & 0o7777)
