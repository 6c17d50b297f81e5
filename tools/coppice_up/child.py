"""One child process of this one: how it is started, whether it lives and answers, what it said last."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from coppice.processes.child_process import describe_exit, tethered
from coppice_up.host import ChildSpec

TAIL_BYTES = 16 * 1024


class LocalChild:
    """A `Child` of this process. Its output goes to its log file; starting again appends to it."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process = self._spawn()
        self._follower = LogFollower(spec.log_path)

    @property
    def spec(self) -> ChildSpec:
        return self._spec

    @property
    def node(self) -> str:
        return ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def restart(self, spec: ChildSpec | None = None) -> None:
        assert not self.is_running(), "a running child is stopped before it is started again"
        self._spec = spec or self._spec
        self._process = self._spawn()

    def terminate(self) -> None:
        """Ask it to stop. A process that is gone already is not an error."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """And with it what it started."""
        if self.is_running():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def describe_exit(self) -> str:
        """`exit code 1` or `killed by SIGKILL`."""
        code = self._process.poll()
        assert code is not None, "only an ended child has an exit"
        return describe_exit(code)

    def is_ready(self) -> bool:
        return self.is_running() and self._spec.probe()

    def new_lines(self) -> list[str]:
        return self._follower.new_lines()

    def last_lines(self, count: int) -> list[str]:
        return last_lines(self._spec.log_path, count)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._spec.log_path.open("ab") as log:
            return subprocess.Popen(
                tethered(self._spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_inherited(), "PYTHONUNBUFFERED": "1", **self._spec.environment},
                # A session of its own: Ctrl-C in the terminal reaches the parent only, which stops children in order.
                start_new_session=True,
            )


def _inherited() -> dict[str, str]:
    """Without the certificate of whoever starts the stack: children are no operators, and keep to this machine. That
    for clients is known here, too, or none is used."""
    left_out = ("COPPICE_TLS_", "COPPICE_SCHEDULER_SSL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log, cheaply; none when there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:]


class LogFollower:
    """Gives the lines that a growing log got since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._position)
            added = log.read()
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
