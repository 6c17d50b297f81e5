"""The cache service's sessions on a Unix socket: who is listed, a restart, a kill -9, what stands in the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coppice.addresses import UnixAddress
from coppice.edge import session_socket
from coppice_cache.edge.durability.registry import WORKERS_KEY, connect
from tests.fakes.cache.cache_ends import Cache, FakeWorker, StreamClient
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
WORKER = "unix:/run/coppice/worker-0"


def command(path: Path, *more: str) -> list[str]:
    ports = ["--grpc-port=0", "--admin-grpc-port=0", "--http-port=0"]
    return [sys.executable, "-m", "coppice_cache", *ports, f"--session-address=unix:{path}", *more]


def answers(path: Path) -> bool:
    try:
        session_socket.connect(UnixAddress(str(path)), WAIT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Until it is killed."""
    with subprocess.Popen(command(path)) as process:
        try:
            wait_for(lambda: answers(path), "the service listens")
            yield process
        finally:
            process.kill()


@pytest.mark.wide
def test_schedulers_and_redis_are_told_of_a_worker_on_a_unix_socket(keep: Keep, socket_dir: Path) -> None:
    valkey = keep(valkey_server())
    valkey.start()
    url = f"redis://127.0.0.1:{valkey.port}/0"
    cache = keep(Cache(session_address=f"unix:{socket_dir}/cache", redis_url=url))
    keep(FakeWorker(cache, address=WORKER)).wait_registered()
    client = keep(StreamClient(cache))
    listed = wait_for(lambda: [info for told in client.workers for info in told.workers], "the worker is listed")
    assert listed[0].address == WORKER
    found = wait_for(lambda: keep(connect(url)).hgetall(WORKERS_KEY), "the worker in the registry")
    assert json.loads(found["w"])["address"] == WORKER


def test_a_restarted_cache_is_found_on_the_same_path(keep: Keep, socket_dir: Path) -> None:
    cache = keep(Cache(session_address=f"unix:{socket_dir}/cache"))
    worker = keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    cache.restart()
    worker.wait_registered(2)
    wait_for(lambda: len(client.attached) == 2, "the client is attached again")
    assert client.attached[1].fresh


def test_a_process_that_was_killed_comes_back_on_its_path(socket_dir: Path) -> None:
    path = socket_dir / "cache"
    with running(path):
        pass
    assert path.exists()
    assert not answers(path)
    with running(path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0
    assert not list(socket_dir.iterdir())


@pytest.mark.parametrize("way", ["taken", "open"])
def test_a_socket_that_cannot_be_ends_with_1_and_uses_up_no_epoch(keep: Keep, socket_dir: Path, way: str) -> None:
    path, epoch = socket_dir / "cache", socket_dir / "epoch"
    if way == "taken":
        keep(Cache(session_address=f"unix:{path}"))
        why = "another process listens there"
    else:
        socket_dir.chmod(0o755)
        why = f"the folder {socket_dir} is open to other users (mode 755); close it with chmod 700"
    ended = subprocess.run(
        command(path, f"--epoch-file={epoch}"), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"python -m coppice_cache: cannot listen on unix:{path} for sessions: {why} (choose another --session-address)"
    )
    assert not epoch.exists()
