"""`python -m coppice_worker` with something wrong: one line that names it, the right exit code, no traceback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_tiny_checkpoint

SHARD = "model-00002-of-"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", sharded=True)


def run(*args: str) -> tuple[int, str]:
    """Exit code and stderr without log lines."""
    done = subprocess.run(
        [sys.executable, "-m", "coppice_worker", "--log-level=error", *args], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def refused(error: str, *words: str) -> None:
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("python -m coppice_worker: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json", SHARD])
def test_a_missing_file_is_named(checkpoint: Path, tmp_path: Path, missing: str) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    found = next(path for path in sorted(broken.iterdir()) if path.name.startswith(missing))
    found.unlink()
    code, error = run(f"--model={broken}")
    assert code == 2
    refused(error, "model.safetensors" if missing.startswith("model.safetensors") else found.name)


def test_a_truncated_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    shard = next(path for path in sorted(broken.iterdir()) if path.name.startswith(SHARD))
    shard.write_bytes(shard.read_bytes()[:-1000])
    code, error = run(f"--model={broken}")
    assert code == 2
    refused(error, shard.name)


def test_no_such_folder(tmp_path: Path) -> None:
    code, error = run(f"--model={tmp_path / 'nothing'}")
    assert code == 2
    refused(error, "nothing", "no such folder")


def test_a_mistyped_flag(checkpoint: Path) -> None:
    code, error = run(f"--model={checkpoint}", "--num-block=4")
    assert code == 2
    refused(error, "--num-block", "--num-blocks")


def test_a_port_that_is_taken(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, error = run(f"--model={checkpoint}", f"--grpc-port={port}", "--num-blocks=4", "--http-port=0")
    assert code == 1
    refused(error, str(port))
