"""`coppice up` over stand-ins for the services: starting, crashing, stopping. No model is loaded here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coppice_up.ports import free_addresses
from tests.fakes.waiting import WAIT_S, wait_for

PARTS = ("valkey", "cache", "worker-0", "scheduler")


class RunningUp:
    """A `coppice up` process and what it printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, log_dir: Path) -> None:
        self.process = process
        self._output = output
        self._log_dir = log_dir

    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.output() or self.process.poll() is not None, text)
        assert text in self.output(), self.output()

    def children(self) -> dict[int, str]:
        """Command lines by pid of what runs under this log folder or with the stand-ins' flags."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self._log_dir) in command:
                found[int(entry.name)] = command
        return found

    def pid_of(self, part: str) -> int:
        matching = [pid for pid, command in self.children().items() if part in command]
        assert len(matching) == 1, (part, self.children())
        return matching[0]

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


Start = Callable[..., "RunningUp"]


@pytest.fixture
def start(tmp_path: Path, socket_dir: Path) -> Iterator[Start]:
    """Temporary folders of what is started are made in `socket_dir`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    started: list[RunningUp] = []

    def begin(port: int = 0, **moods: str) -> RunningUp:
        output = tmp_path / "output"
        environment = {**os.environ, **{f"COPPICE_FAKE_{name.upper()}": mood for name, mood in moods.items()}}
        environment["TMPDIR"] = str(socket_dir)
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.tools.up_driver", str(port), str(tmp_path)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        started.append(RunningUp(process, output, tmp_path))
        return started[-1]

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait(WAIT_S)
        wait_for(lambda up=up: not up.children(), "children gone after the test")  # type: ignore[misc]


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_ctrl_c_stops_everything_in_order(start: Start, tmp_path: Path) -> None:
    port = free_addresses(1)[0].port
    up = start(port)
    up.wait_for("development setup")
    assert f"http://127.0.0.1:{port}/v1" in up.output()
    for part in PARTS:
        assert f"{part} is ready" in up.output()
    assert len(up.children()) == len(PARTS)
    assert up.stop(signal.SIGINT) == 0
    assert not up.children()
    assert "fake scheduler stops" in (tmp_path / "scheduler.log").read_text()


def test_sigterm_is_orderly_too(start: Start) -> None:
    up = start()
    up.wait_for("development setup")
    assert up.stop(signal.SIGTERM) == 0
    assert not up.children()


def test_a_second_ctrl_c_does_not_wait_for_a_deaf_child_and_its_children(start: Start) -> None:
    up = start(scheduler="deaf")
    up.wait_for("development setup")
    assert len(up.children()) == len(PARTS) + 1
    up.process.send_signal(signal.SIGINT)
    up.wait_for("stopping")
    assert up.stop(signal.SIGINT) == 0
    assert "did not stop in" not in up.output(), "what is said of a child whose grace is over"
    assert not up.children()


@pytest.mark.skipif(sys.platform != "linux", reason="children are tied to their parent by the Linux kernel")
def test_children_die_with_a_parent_that_is_killed(start: Start) -> None:
    up = start()
    up.wait_for("development setup")
    assert len(up.children()) == len(PARTS)
    up.process.kill()
    wait_for(lambda: not up.children(), "children gone after SIGKILL of the parent")


def test_a_crashed_child_comes_back(start: Start) -> None:
    up = start()
    up.wait_for("development setup")
    os.kill(up.pid_of("fakes.cache.service cache"), signal.SIGKILL)
    up.wait_for("cache is started again (1 of 5 a minute)")
    wait_for(lambda: up.output().count("cache is ready") == 2, "cache ready again")
    assert "cache died (killed by SIGKILL)" in up.output()
    assert up.stop() == 0


def test_the_folder_of_sockets_goes_with_the_stack(start: Start, socket_dir: Path) -> None:
    up = start()
    up.wait_for("development setup")
    (folder,) = socket_dir.iterdir()
    assert f"sessions       unix:{folder}/cache (" in up.output()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "worker-0").touch()  # as a service that has to be killed leaves it
    assert up.stop() == 0
    assert not list(socket_dir.iterdir())


def test_a_child_that_dies_while_starting_ends_all(start: Start, socket_dir: Path) -> None:
    up = start(cache="dies")
    assert up.process.wait(WAIT_S) == 1
    assert "cache | coppice cache: the disk is on fire" in up.output()
    assert "coppice: cache died while it started (exit code 1)" in up.output()
    assert not up.children()
    assert not list(socket_dir.iterdir())


@pytest.mark.wide
def test_a_child_that_keeps_crashing_ends_all(start: Start) -> None:
    up = start(cache="crashes")
    assert up.process.wait(WAIT_S) == 1
    assert "cache is started again (1 of 5 a minute)" in up.output()
    assert "cache died" in up.output().splitlines()[-1]
    assert not up.children()


def test_a_port_in_use_is_said_before_anything_starts(start: Start, tmp_path: Path) -> None:
    with listening() as port:
        up = start(port)
        assert up.process.wait(WAIT_S) == 1
    assert up.output() == f"coppice: port {port} on 127.0.0.1 is in use (choose another with --port)\n"
    assert not list(tmp_path.glob("*.log"))
