"""The folder of a disk pool over the lives of its processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from coppice.ids import WorkerEpoch
from coppice_worker.disk.block_file import PART, BlockName
from coppice_worker.disk.folder import (
    DiskFolder,
    FolderInUse,
    FolderNotOurs,
    Found,
    ScanTooLong,
    identity_of,
    take_away,
)
from tests.unit.worker.disk.files import EPOCH, IDENTITY, block_files, handle, seal

NOTHING = Found(WorkerEpoch(0), ())


def begun(path: Path, *names: BlockName, num_blocks: int = 8) -> DiskFolder:
    """With a file of each of these names; what is in it counts when it is read."""
    folder = DiskFolder(path, IDENTITY, num_blocks)
    folder.begin(EPOCH)
    for name in names:
        (folder.part_of(name.handle & 0xFFFFFF) / str(name)).touch()
    return folder


def scanned(path: Path, num_blocks: int = 8) -> Found:
    folder = DiskFolder(path, IDENTITY, num_blocks)
    try:
        return folder.scan()
    finally:
        folder.close()


def test_a_new_folder_has_nothing(tmp_path: Path) -> None:
    assert scanned(tmp_path / "worker") == NOTHING


def test_a_disk_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DiskFolder(tmp_path / "mount" / "worker", IDENTITY, 8)


def test_all_folders_are_for_nobody_else_also_those_that_were_there(tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    worker.mkdir(mode=0o755)
    (worker / IDENTITY).mkdir(mode=0o770)
    begun(worker).close()
    folders = [worker, *(path for path in worker.rglob("*") if path.is_dir())]
    assert len(folders) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_what_belongs_to_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FolderNotOurs):
        DiskFolder(tmp_path, IDENTITY, 8)


@pytest.mark.parametrize("place", ["epoch", "part"])
def test_no_link_is_followed(tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a note").touch()
    worker = tmp_path / "worker"
    folder = begun(worker)
    path = folder.part_of(0) if place == "part" else folder.part_of(0).parent
    shutil.rmtree(path)
    path.symlink_to(elsewhere)
    folder.close()
    assert scanned(worker).names == ()
    again = DiskFolder(worker, IDENTITY, 8)
    again.begin(EPOCH)
    take_away(again.leftovers())
    assert again.leftovers() == ()
    assert [file.name for file in elsewhere.iterdir()] == ["a note"]
    again.close()


def test_a_folder_that_is_taken_away_as_it_is_opened_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        os.rename(tmp_path / IDENTITY, tmp_path / "old")
        (tmp_path / IDENTITY).mkdir()

    monkeypatch.setattr(fcntl, "flock", locked)
    with pytest.raises(FolderInUse):
        DiskFolder(tmp_path, IDENTITY, 8)


def test_what_is_there_is_found_by_its_name(tmp_path: Path) -> None:
    names = BlockName(handle(0), seal(1)), BlockName(handle(7), seal(2))
    begun(tmp_path, *names).close()
    found = scanned(tmp_path)
    assert found.epoch == EPOCH
    assert sorted(found.names) == sorted(names)


def test_a_second_process_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from coppice_worker.disk.folder import DiskFolder\n"
        f"folder = DiskFolder(pathlib.Path(sys.argv[1]), {IDENTITY!r}, 8)\n"
        "print('has it', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(FolderInUse):
            DiskFolder(tmp_path, IDENTITY, 8)
        other.kill()
    DiskFolder(tmp_path, IDENTITY, 8).close()


def test_another_identity_is_another_folder(tmp_path: Path) -> None:
    begun(tmp_path, BlockName(handle(0), seal(1)))
    other = DiskFolder(tmp_path, identity_of("another model"), 8)
    assert other.scan() == NOTHING


def test_identities_differ_wherever_their_parts_do() -> None:
    lists = [("a", "b"), ("ab",), ("a", "b", ""), ("", "a", "b"), ("b", "a"), (b"a\0", "b")]
    assert len({identity_of(*parts) for parts in lists}) == len(lists)


def test_of_two_files_of_one_block_the_newer_counts_and_the_older_goes(tmp_path: Path) -> None:
    older, newer = BlockName(handle(3, 1), seal(9)), BlockName(handle(3, 2), seal(1))
    begun(tmp_path, older, newer).close()
    assert scanned(tmp_path).names == (newer,)
    assert block_files(tmp_path) == [str(newer)]


def test_what_was_not_finished_goes(tmp_path: Path) -> None:
    name = BlockName(handle(3), seal(1))
    folder = begun(tmp_path)
    (folder.part_of(3) / f"{name}{PART}").write_bytes(b"half")
    (folder.part_of(3) / "a note").touch()
    folder.close()
    assert scanned(tmp_path).names == ()
    assert block_files(tmp_path) == []


def test_blocks_beyond_a_pool_that_became_smaller_go(tmp_path: Path) -> None:
    inside, outside, far = (BlockName(handle(block), seal(block)) for block in (3, 5, 5_000))
    begun(tmp_path, inside, outside, far, num_blocks=8_192).close()
    assert scanned(tmp_path, num_blocks=4).names == (inside,)
    assert block_files(tmp_path) == [str(inside)]


def test_a_pool_may_become_larger(tmp_path: Path) -> None:
    name = BlockName(handle(3), seal(1))
    begun(tmp_path, name, num_blocks=4).close()
    folder = DiskFolder(tmp_path, IDENTITY, 8_192)
    assert folder.scan().names == (name,)
    assert folder.part_of(8_191).is_dir()


def test_what_is_begun_anew_has_nothing_of_before_and_the_rest_can_be_taken_away(tmp_path: Path) -> None:
    folder = begun(tmp_path, BlockName(handle(3), seal(1)))
    folder.begin(WorkerEpoch(EPOCH + 1))
    folder.close()
    assert scanned(tmp_path) == Found(WorkerEpoch(EPOCH + 1), ())
    assert len(folder.leftovers()) == 1
    take_away(folder.leftovers())
    assert folder.leftovers() == ()


def test_a_pool_can_begin_anew_under_a_lower_epoch_and_under_the_same(tmp_path: Path) -> None:
    """Another cache service that counts from the start again."""
    folder = begun(tmp_path, BlockName(handle(3), seal(1)))
    for epoch in (WorkerEpoch(EPOCH - 1), WorkerEpoch(EPOCH - 1)):
        folder.begin(epoch)
    folder.close()
    assert scanned(tmp_path) == Found(WorkerEpoch(EPOCH - 1), ())
    assert len(folder.leftovers()) == 2


def test_of_several_epochs_none_counts(tmp_path: Path) -> None:
    folder = begun(tmp_path, BlockName(handle(3), seal(1)))
    (tmp_path / IDENTITY / f"{EPOCH + 1:016x}").mkdir()
    folder.close()
    assert scanned(tmp_path) == NOTHING


def test_a_folder_that_takes_too_long_to_list_is_not_taken(tmp_path: Path) -> None:
    folder = begun(tmp_path, num_blocks=4 * 4_096)
    ticks = count(0, 15)
    with pytest.raises(ScanTooLong):
        folder.scan(clock=lambda: float(next(ticks)))
    folder.begin(EPOCH)
    assert folder.scan().names == ()


def test_what_another_took_away_meanwhile_keeps_nobody_from_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    take_away([tmp_path / "gone", folder])
    assert not folder.exists()
