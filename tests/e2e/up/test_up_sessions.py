"""Sessions of `coppice up` run over Unix sockets: no port is open for them, and a killed service finds its peers."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI, OpenAIError

from coppice_up.ports import free_addresses
from tests.e2e.up.test_up import ENVIRONMENT, Up, ctrl_c_leaves_nothing_running, started
from tests.fakes.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who listens where")
LISTENS = "0A"  # in /proc/net/tcp


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with started(tmp_path_factory.mktemp("up"), "--threads", "1") as up:
        yield up
        ctrl_c_leaves_nothing_running(up)


def command_of(up: Up, module: str) -> tuple[int, list[str]]:
    """Pid and command line of the child that runs `module`, however it is started."""
    folder = up.find(r"sessions +unix:(\S+)/cache")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if module in words and any(folder in word for word in words):
            found.append((int(entry.name), words))
    return min(found)


def ports_of(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
        except FileNotFoundError:
            continue
        if found:
            inodes.add(found[1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in inodes}


def named_ports(command: list[str]) -> set[int]:
    flags = ("--grpc-port", "--admin-grpc-port", "--http-port")
    return {int(command[command.index(flag) + 1]) for flag in flags if flag in command}


def answer(up: Up) -> str:
    """Of the model, to a question that it has been asked before."""
    with OpenAI(base_url=up.find(r"OpenAI API +(\S+)"), api_key="none", max_retries=0, timeout=60) as client:
        done = client.completions.create(model="coppice-demo", prompt="def sorted(", max_tokens=4, temperature=0)
        return done.choices[0].text


def test_no_port_is_open_for_sessions(up: Up) -> None:
    for module in ("coppice_cache", "coppice_worker"):
        pid, command = command_of(up, module)
        assert ports_of(pid) == named_ports(command)
    sockets = sorted(up.socket_dir().iterdir())
    assert [path.name for path in sockets] == ["cache", "worker-0"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (up.socket_dir(), *sockets)] == [0o700, 0o600, 0o600]


@pytest.mark.parametrize("module", ["coppice_worker", "coppice_cache"])
@pytest.mark.wide
def test_a_service_that_was_killed_listens_on_its_path_again(up: Up, module: str) -> None:
    before = answer(up)
    pid, _ = command_of(up, module)
    os.kill(pid, signal.SIGKILL)
    name = {"coppice_cache": "cache", "coppice_worker": "worker-0"}[module]
    wait_for(lambda: up.output().count(f"{name} is ready") == 2, f"{name} is ready again")

    def same() -> bool:
        try:
            return answer(up) == before
        except OpenAIError:
            return False

    wait_for(same, "the same answer as before")


@pytest.mark.wide
def test_a_further_worker_joins_by_the_printed_address(up: Up, tmp_path: Path) -> None:
    _, command = command_of(up, "coppice_worker")
    grpc, http = free_addresses(2)
    changed = {
        "--worker-id": "further",
        "--cache": up.find(r"sessions +(\S+)"),
        "--session-address": f"unix:{up.socket_dir()}/further",
        "--grpc-port": str(grpc.port),
        "--http-port": str(http.port),
    }
    words = command[command.index("coppice_worker") + 1 :]
    options: Any = dict(zip(words[::2], words[1::2], strict=False)) | changed
    argv = [sys.executable, "-m", "coppice_worker", *(word for option in options.items() for word in option)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stderr=log, env=ENVIRONMENT) as further:
        try:
            wait_for(
                lambda: {worker["worker_id"] for worker in up.stats()["workers"]} == {"worker-0", "further"},
                "both workers are listed",
            )
            further.send_signal(signal.SIGTERM)
            assert further.wait(WAIT_S) == 0
        finally:
            further.kill()
    assert sorted(path.name for path in up.socket_dir().iterdir()) == ["cache", "worker-0"]
