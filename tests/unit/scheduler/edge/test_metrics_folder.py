"""Folders of metrics: those that nobody holds any more go, all others stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coppice_scheduler.edge.base.metrics_folder import metrics_folder

HOLDER = """
import sys, time
from coppice_scheduler.edge.base.metrics_folder import metrics_folder
with metrics_folder(sys.argv[1]) as folder:
    open(folder + "/counter.db", "w").close()
    print(folder, flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder of its own."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_lives_as_long_as_its_block(tmp_path: Path) -> None:
    with metrics_folder(str(tmp_path)) as folder:
        assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()


def test_what_killed_processes_left_goes_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    with holder(tmp_path) as (killed, left), holder(tmp_path) as (_, held):
        killed.kill()
        killed.wait()
        others = [tmp_path / "coppice-metrics-x", tmp_path / "something"]
        for other in others:
            other.mkdir()
        (tmp_path / f"{left.name}-link").symlink_to(others[1])
        assert left.is_dir()
        with metrics_folder(str(tmp_path)) as ours:
            assert not left.exists()
            assert (held / "counter.db").exists()
            assert all(other.is_dir() for other in others)
            assert Path(ours).is_dir()


def test_one_process_may_have_several(tmp_path: Path) -> None:
    with metrics_folder(str(tmp_path)) as first, metrics_folder(str(tmp_path)) as second:
        assert first != second
        assert Path(first).is_dir()
