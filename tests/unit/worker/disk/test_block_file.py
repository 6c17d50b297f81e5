"""A file of a block: whole and right, or lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from coppice_worker.disk.block_file import (
    HEAD_BYTES,
    PART,
    BlockName,
    NotWhole,
    parse_name,
    read_block,
    write_block,
)
from tests.unit.worker.disk.files import BLOCK_BYTES, content, handle, seal

NAME = BlockName(handle(3), seal(1))


def read(folder: Path, name: BlockName = NAME, num_bytes: int = BLOCK_BYTES) -> bytes:
    got = bytearray(num_bytes)
    read_block(folder, name, memoryview(got))
    return bytes(got)


def written(folder: Path) -> Path:
    write_block(folder, NAME, content(1).data)
    return folder / str(NAME)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    assert read(tmp_path) == content(1).tobytes()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    assert written(tmp_path).stat().st_mode & 0o077 == 0


def test_a_name_says_handle_and_seal() -> None:
    assert parse_name(str(NAME)) == NAME
    for text in ("", "lock", f"{NAME}{PART}", f"{NAME}0", str(NAME).upper(), f"x{NAME}"[:-1]):
        assert parse_name(text) is None


def test_one_that_is_not_there_is_lost(tmp_path: Path) -> None:
    with pytest.raises(NotWhole):
        read(tmp_path)


@pytest.mark.parametrize("at", [*range(HEAD_BYTES - 8), HEAD_BYTES, HEAD_BYTES + BLOCK_BYTES - 1])
def test_a_changed_bit_is_noticed_wherever_it_is(tmp_path: Path, at: int) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(NotWhole):
        read(tmp_path)


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + BLOCK_BYTES - 1])
def test_a_torn_file_is_noticed(tmp_path: Path, length: int) -> None:
    os.truncate(written(tmp_path), length)
    with pytest.raises(NotWhole):
        read(tmp_path)


def test_pages_that_never_reached_the_disk_are_noticed(tmp_path: Path) -> None:
    """The length is right and the rest zeros: a power failure under a file system that writes lengths first."""
    file = written(tmp_path)
    os.truncate(file, 0)
    os.truncate(file, HEAD_BYTES + BLOCK_BYTES)
    with pytest.raises(NotWhole):
        read(tmp_path)


@pytest.mark.parametrize("other", [BlockName(handle(3, 2), seal(1)), BlockName(handle(4), seal(1))])
def test_a_whole_block_under_the_name_of_another_occupancy_is_noticed(tmp_path: Path, other: BlockName) -> None:
    written(tmp_path).rename(tmp_path / str(other))
    with pytest.raises(NotWhole):
        read(tmp_path, other)


def test_a_whole_block_under_the_name_of_another_content_is_noticed(tmp_path: Path) -> None:
    other = BlockName(NAME.handle, seal(2))
    written(tmp_path).rename(tmp_path / str(other))
    with pytest.raises(NotWhole):
        read(tmp_path, other)


def test_a_block_of_another_size_is_noticed(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(NotWhole):
        read(tmp_path, num_bytes=BLOCK_BYTES // 2)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path).rename(tmp_path / "elsewhere")
    (tmp_path / str(NAME)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotWhole):
        read(tmp_path)


def test_a_disk_that_takes_no_more_leaves_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, hard))
    try:
        with pytest.raises(OSError, match="large"):
            write_block(tmp_path, NAME, content(1).data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []
