"""A worker that starts has its disk tier soon, or does without; flags that cannot work are refused."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice_worker.disk import opening
from coppice_worker.disk.block_file import HEAD_BYTES
from coppice_worker.disk.opening import blocks_within, open_pool
from coppice_worker.edge.settings import WorkerSettings
from tests.fakes.waiting import wait_for
from tests.unit.worker.disk.files import BLOCK_BYTES, IDENTITY, host_memory, opened


def settings(*flags: str) -> WorkerSettings:
    return parse_settings(WorkerSettings, ["--model=none", *flags], {}, "python -m coppice_worker")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--disk-mib=8", "--host-memory-mib=8"], "--disk-mib needs --disk-folder"),
        (["--disk-mib=8", "--disk-folder=d"], "--disk-mib needs --host-memory-mib"),
        (
            ["--disk-mib=8", "--disk-folder=d", "--host-memory-mib=8", "--tensor-parallel=2"],
            "a model that is shared out \\(--tensor-parallel\\) has no disk tier",
        ),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings(*flags)


def test_a_folder_alone_is_no_tier() -> None:
    assert settings("--disk-folder=d").disk_mib == 0


def test_a_file_takes_whole_pages_of_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    assert blocks_within(1 << 20, 4_096 - HEAD_BYTES, 1_000) == 256
    assert blocks_within(1 << 20, BLOCK_BYTES, 1_000) == 128
    assert blocks_within(4_096, BLOCK_BYTES, 1_000) == 0
    assert not caplog.records
    assert blocks_within(1 << 40, BLOCK_BYTES, 1 << 30) == 1 << 20
    assert blocks_within(1 << 20, BLOCK_BYTES, 100) == 100, "a registration tells of each"
    assert caplog.messages[-1] == "the disk tier has 100 blocks at most, 0 MiB of 1"
    assert blocks_within(1 << 20, BLOCK_BYTES, -5) == 0


def test_a_build_is_named_by_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(opening, "__file__", str(tmp_path / "disk" / "opening.py"))
    found = [opening.digest_of_sources()]
    for path, text in (("a.py", "1"), ("a.py", "2"), ("disk/a.c", "2"), ("a.md", "2")):
        (tmp_path / path).write_text(text)
        found.append(opening.digest_of_sources())
    assert found[3] == found[4], "a text is no source"
    assert len(set(found)) == 4


def test_a_disk_that_is_not_mounted_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_pool(tmp_path / "mount" / "worker", "0" * 32, 4, host_memory()) is None
    assert f"{tmp_path / 'mount'} is not there" in caplog.text


def test_a_folder_that_another_process_has_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = opened(tmp_path, host_memory())
    assert open_pool(tmp_path, IDENTITY, 8, host_memory()) is None
    assert "is used by another process" in caplog.text
    folder.close()
    assert open_pool(tmp_path, IDENTITY, 8, host_memory()) is not None


def test_what_another_build_or_model_left_is_taken_away_unless_somebody_has_it(tmp_path: Path) -> None:
    held, _ = opened(tmp_path, host_memory())
    over, mine = "1" * 32, "2" * 32
    (tmp_path / over / "000000000000002a" / "000").mkdir(parents=True)
    (tmp_path / "keep").mkdir()
    (tmp_path / ("z" * 32)).mkdir()
    assert open_pool(tmp_path, mine, 8, host_memory()) is not None
    wait_for(lambda: not (tmp_path / over).exists(), "the other folder to go")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([IDENTITY, mine, "keep", "z" * 32])
    held.close()


def test_a_place_where_no_folder_can_be_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert open_pool(tmp_path / "file", IDENTITY, 8, host_memory()) is None
    assert "no disk tier" in caplog.text


def test_a_disk_that_does_not_answer_keeps_no_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_answer = threading.Event()

    class Hanging(opening.DiskFolder):
        def __init__(self, *arguments: object) -> None:
            may_answer.wait(60)
            raise OSError("gone")

    monkeypatch.setattr(opening, "DiskFolder", Hanging)
    monkeypatch.setattr(opening, "OPEN_S", 0.05)
    with caplog.at_level(logging.WARNING):
        assert open_pool(tmp_path, IDENTITY, 8, host_memory()) is None
    may_answer.set()
    assert "has not answered" in caplog.text
