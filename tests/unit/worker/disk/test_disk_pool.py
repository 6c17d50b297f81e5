"""Blocks on a disk: bounded, whole or not there, and no fault of anybody else when the disk fails."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from coppice.handles import generation_of
from coppice.ids import WorkerEpoch
from coppice_worker.disk import disk_pool
from coppice_worker.disk.disk_pool import REST_S, DiskPool
from coppice_worker.disk.folder import DiskFolder
from coppice_worker.disk.metrics import DiskMetrics
from tests.unit.worker.disk.files import (
    BLOCK_BYTES,
    EPOCH,
    IDENTITY,
    block_files,
    content,
    handle,
    handles,
    host_memory,
    ids,
    opened,
    seal,
    seals,
)

LATER = WorkerEpoch(EPOCH + 1)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of a block's size can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def begun(path: Path) -> tuple[DiskFolder, DiskPool]:
    """Contents 1, 2, 3 are in blocks 5, 6, 7."""
    folder, pool = opened(path, host_memory())
    pool.begin(EPOCH)
    assert pool.store(EPOCH, ids(1, 2, 3), handles(5, 6, 7), seals(1, 2, 3)).all()
    return folder, pool


def seen(pool: DiskPool | None) -> tuple[float | None, float | None]:
    """By whoever scrapes: whether it takes blocks, and how many were lost."""
    registry = CollectorRegistry()
    registry.register(DiskMetrics(pool))
    names = "coppice_worker_disk_up", "coppice_worker_disk_lost_blocks_total"
    up, lost = (registry.get_sample_value(name) for name in names)
    return up, lost


def test_a_disk_that_is_not_there_is_seen() -> None:
    assert seen(None) == (0, 0)


def file_of(folder: DiskFolder, block: int, number: int) -> Path:
    return folder.part_of(block) / f"{handle(block):016x}-{seal(number).hex()}"


def test_what_is_stored_is_loaded_into_other_blocks_of_the_host(tmp_path: Path) -> None:
    host = host_memory()
    _, pool = opened(tmp_path, host)
    pool.begin(EPOCH)
    assert pool.store(EPOCH, ids(1, 2), handles(5, 6), seals(1, 2)).all()
    assert pool.load(EPOCH, handles(6, 5), seals(2, 1), ids(10, 11))[0].all()
    assert (host[10] == content(2)).all()
    assert (host[11] == content(1)).all()


def test_a_new_process_has_what_the_one_before_was_told_is_there(tmp_path: Path) -> None:
    begun(tmp_path)[0].close()
    host = host_memory()
    _, pool = opened(tmp_path, host)
    assert pool.epoch == EPOCH
    _, generations, found = pool.reported()
    assert generations.tolist() == [0] * 5 + [generation_of(handle(5))] * 3
    assert found.tobytes() == bytes(5 * 16) + seals(1, 2, 3)
    assert pool.load(EPOCH, handles(5, 6, 7), seals(1, 2, 3), ids(0, 1, 2))[0].all()
    assert pool.num_tried == 3
    assert (host[:3] == np.stack([content(number) for number in (1, 2, 3)])).all()


def test_a_block_that_is_stored_again_has_one_file(tmp_path: Path) -> None:
    folder, pool = begun(tmp_path)
    assert pool.store(EPOCH, ids(4), handles(5, counter=2), seals(4)).all()
    assert len(block_files(tmp_path)) == 3
    assert pool.load(EPOCH, handles(5), seals(1), ids(0))[0].tolist() == [False], "that occupancy is over"
    assert pool.load(EPOCH, handles(5, counter=2), seals(4), ids(0))[0].all()
    folder.close()


def test_the_right_block_under_another_seal_is_not_loaded(tmp_path: Path) -> None:
    _, pool = begun(tmp_path)
    assert pool.load(EPOCH, handles(5, 6), seals(9, 2), ids(0, 1))[0].tolist() == [False, True]


def test_a_bad_file_is_lost_and_goes_and_the_others_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, pool = begun(tmp_path)
    bad = file_of(folder, 6, 2)
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert pool.load(EPOCH, handles(5, 6, 7), seals(1, 2, 3), ids(0, 1, 2))[0].tolist() == [True, False, True]
    assert seen(pool) == (1, 1)
    assert len(caplog.records) == 1
    assert not bad.exists()
    assert pool.reported()[1][6] == 0


def test_a_full_disk_is_said_once_and_left_alone_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [1_000.0]
    pool = DiskPool(DiskFolder(tmp_path, IDENTITY, 8), host_memory(), clock=lambda: now[0])
    pool.begin(EPOCH)
    assert pool.store(EPOCH, ids(1), handles(5), seals(1)).all()
    with full_disk(), caplog.at_level(logging.WARNING):
        assert not pool.store(EPOCH, ids(2, 3), handles(6, 7), seals(2, 3)).any()
        assert not pool.store(EPOCH, ids(2), handles(6), seals(2)).any()
    assert len(caplog.records) == 1
    assert pool.is_resting
    assert seen(pool) == (0, 0)
    assert not pool.store(EPOCH, ids(2), handles(6), seals(2)).any(), "it takes more by now, which nobody has tried"
    assert pool.load(EPOCH, handles(5), seals(1), ids(0))[0].all(), "what is there can be read"
    now[0] += REST_S
    assert seen(pool) == (0, 0), "nobody knows yet"
    assert pool.store(EPOCH, ids(2), handles(6), seals(2)).all()
    assert seen(pool) == (1, 0)


def test_a_disk_that_is_taken_away_loses_what_it_had_and_fails_nobody(tmp_path: Path) -> None:
    folder, pool = begun(tmp_path)
    os.rename(tmp_path / IDENTITY, tmp_path / "away")
    assert not pool.load(EPOCH, handles(5), seals(1), ids(0))[0].any()
    assert not pool.store(EPOCH, ids(4), handles(4), seals(4)).any()
    pool.begin(LATER)
    assert not pool.store(LATER, ids(4), handles(4), seals(4)).any()
    assert pool.is_resting
    folder.close()


def test_a_pool_that_could_not_begin_tries_again_before_it_writes(tmp_path: Path) -> None:
    now = [0.0]
    pool = DiskPool(DiskFolder(tmp_path, IDENTITY, 8), host_memory(), clock=lambda: now[0])
    os.rename(tmp_path / IDENTITY, tmp_path / "away")
    pool.begin(EPOCH)
    assert not pool.store(EPOCH, ids(1), handles(5), seals(1)).any()
    os.rename(tmp_path / "away", tmp_path / IDENTITY)
    assert not pool.store(EPOCH, ids(1), handles(5), seals(1)).any(), "it rests"
    now[0] += REST_S
    assert pool.store(EPOCH, ids(1), handles(5), seals(1)).all()


def test_a_pool_goes_on_under_another_epoch(tmp_path: Path) -> None:
    folder, pool = begun(tmp_path)
    pool.begin(LATER, keeps=True)
    assert pool.load(LATER, handles(5), seals(1), ids(0))[0].all()
    assert pool.store(LATER, ids(4), handles(4), seals(4)).all()
    folder.close()
    host = host_memory()
    _, after = opened(tmp_path, host)
    assert after.epoch == LATER
    assert after.load(LATER, handles(4, 5), seals(4, 1), ids(0, 1))[0].all()
    assert (host[0] == content(4)).all()


def test_a_pool_that_begins_anew_has_nothing(tmp_path: Path) -> None:
    folder, pool = begun(tmp_path)
    pool.begin(LATER)
    assert not pool.load(LATER, handles(5), seals(1), ids(0))[0].any()
    assert pool.store(LATER, ids(4), handles(4), seals(4)).all()
    assert np.flatnonzero(pool.reported()[1]).tolist() == [4]
    folder.close()
    assert opened(tmp_path, host_memory())[1].epoch == LATER


@pytest.mark.parametrize("ends", [lambda pool: pool.begin(LATER), lambda pool: pool.close()], ids=["epoch", "closed"])
def test_a_copy_that_hung_until_it_was_over_touches_no_block_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[DiskPool], None]
) -> None:
    """The disk answers in the middle of it, when its blocks are others'."""
    host = host_memory()
    _, pool = opened(tmp_path, host)
    pool.begin(EPOCH)
    assert pool.store(EPOCH, ids(1, 2), handles(5, 6), seals(1, 2)).all()

    def hung(*arguments: object) -> None:
        monkeypatch.undo()
        ends(pool)
        host[:] = 0
        original(*arguments)

    original: Callable[..., None] = disk_pool.read_block
    monkeypatch.setattr(disk_pool, "read_block", hung)
    assert not pool.load(EPOCH, handles(5, 6), seals(1, 2), ids(10, 11))[0].any()
    assert not host.any()


def test_what_is_written_late_is_what_was_there_when_it_was_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_memory()
    folder, pool = opened(tmp_path, host)
    pool.begin(EPOCH)

    def hung(*arguments: object) -> None:
        pool.close()
        host[:] = 0
        original(*arguments)

    original: Callable[..., None] = disk_pool.write_block
    monkeypatch.setattr(disk_pool, "write_block", hung)
    assert not pool.store(EPOCH, ids(3, 4), handles(3, 4), seals(3, 4)).any()
    folder.close()
    host = host_memory()
    _, after = opened(tmp_path, host)
    assert np.flatnonzero(after.reported()[1]).tolist() == [3]
    assert after.load(EPOCH, handles(3), seals(3), ids(0))[0].all()
    assert (host[0] == content(3)).all()


def test_what_cannot_be_read_now_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pool = begun(tmp_path)

    def out_of_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(disk_pool, "read_block", out_of_files)
        come, lost = pool.load(EPOCH, handles(5, 6), seals(1, 2), ids(0, 1))
    assert not come.any()
    assert not lost.any()
    assert pool.num_lost == 0
    assert len(block_files(tmp_path)) == 3
    assert pool.load(EPOCH, handles(5, 6), seals(1, 2), ids(0, 1))[0].all()
    folder.close()


def test_what_lies_on_a_bad_sector_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be asked for, and hold up all other blocks, for as long as it is found."""
    folder, pool = begun(tmp_path)

    def unreadable(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", unreadable)
        come, lost = pool.load(EPOCH, handles(5), seals(1), ids(0))
    assert (come.any(), lost.all()) == (False, True)
    assert len(block_files(tmp_path)) == 2
    assert not pool.is_resting
    assert pool.load(EPOCH, handles(6), seals(2), ids(1))[0].all()
    folder.close()


STEPS = ("open", "write", "fdatasync", "rename", "fsync")


def test_a_block_is_on_the_disk_before_its_name_and_its_name_before_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pool = begun(tmp_path)
    done: list[str] = []
    for step in STEPS:
        real = getattr(os, step)
        monkeypatch.setattr(
            os, step, lambda *args, step=step, real=real, **more: (done.append(step), real(*args, **more))[1]
        )
    assert pool.store(EPOCH, ids(4), handles(4), seals(4)).all()
    assert done == ["open", "write", "write", "fdatasync", "rename", "open", "fsync"]
    folder.close()


@pytest.mark.parametrize("step", STEPS)
def test_whatever_fails_the_block_is_not_said_to_be_there_and_the_older_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder, pool = begun(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fails)
        assert not pool.store(EPOCH, ids(4), handles(5, counter=2), seals(4)).any()
    assert not [file for file in block_files(tmp_path) if file.endswith(".part")]
    assert not pool.load(EPOCH, handles(5), seals(1), ids(0))[0].any()
    folder.close()
