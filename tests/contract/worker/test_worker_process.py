"""`python -m coppice_worker` with something wrong: one line that names it, the right exit code, no traceback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coppice_worker import __main__ as main_module
from tests.fakes.checkpoints import write_tiny_checkpoint

SHARD = "model-00002-of-"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", sharded=True)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Run:
    """Exit code and stderr of `main`, in this process, without taking over its signals and logs."""
    monkeypatch.setattr(main_module, "configure_logging", lambda level, log_format: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def run_main(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["coppice_worker", "--threads=1", *flags])
        try:
            code = main_module.main()
        except SystemExit as ended:
            code = int(str(ended.code))
        return code, capsys.readouterr().err

    return run_main


def refused(error: str, *words: str) -> None:
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("python -m coppice_worker: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json", SHARD])
def test_a_missing_file_is_named(run: Run, checkpoint: Path, tmp_path: Path, missing: str) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    found = next(path for path in sorted(broken.iterdir()) if path.name.startswith(missing))
    found.unlink()
    code, error = run(f"--model={broken}")
    assert code == 2
    refused(error, "model.safetensors" if missing.startswith("model.safetensors") else found.name)


def test_a_truncated_file_is_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    shard = next(path for path in sorted(broken.iterdir()) if path.name.startswith(SHARD))
    shard.write_bytes(shard.read_bytes()[:-1000])
    code, error = run(f"--model={broken}")
    assert code == 2
    refused(error, shard.name)


def test_no_such_folder(run: Run, tmp_path: Path) -> None:
    code, error = run(f"--model={tmp_path / 'nothing'}")
    assert code == 2
    refused(error, "nothing", "no such folder")


def test_a_mistyped_flag_of_a_process(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "coppice_worker", f"--model={checkpoint}", "--num-block=4"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    refused(ended.stderr, "--num-block", "--num-blocks")


def test_a_port_that_is_taken(run: Run, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, error = run(f"--model={checkpoint}", f"--grpc-port={port}", "--num-blocks=4", "--http-port=0")
    assert code == 1
    refused(error, str(port))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
def test_grpc_listens_where_operators_are(run: Run, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        flags = ("--http-host=127.0.0.2", f"--grpc-port={port}", "--num-blocks=4", "--http-port=0", "--session-port=0")
        code, error = run(f"--model={checkpoint}", *flags)
    assert code == 1
    refused(error, f"127.0.0.2:{port}")


def test_a_socket_that_others_could_reach(run: Run, checkpoint: Path, socket_dir: Path) -> None:
    socket_dir.chmod(0o755)
    address = f"--session-address=unix:{socket_dir}/worker"
    code, error = run(f"--model={checkpoint}", address, "--grpc-port=0", "--num-blocks=4", "--http-port=0")
    assert code == 1
    refused(error, f"unix:{socket_dir}/worker", "chmod 700", "choose another --session-address")


def test_a_public_address_needs_tls_or_a_word(run: Run, checkpoint: Path) -> None:
    code, error = run(f"--model={checkpoint}", "--host=0.0.0.0")
    assert code == 2
    refused(error, "--host 0.0.0.0 can be reached from other machines", "--insecure-network")
