"""What runs the containers: Docker with compose where its engine answers, else podman with podman-compose."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

QUICK_S = 60.0
PULL_S = 600.0
MISSING = (
    "no container engine: neither a Docker engine with compose answers (docker info, docker compose version), "
    "nor are podman and podman-compose here. Start Docker; or, on Debian and as root, say "
    'eval "$(.ci/containers)" and make test-containers.'
)


class NoEngine(Exception):
    """Nothing here runs containers; the message says what to do."""


@dataclass(frozen=True)
class Engine:
    name: str  # docker or podman
    compose: tuple[str, ...]
    build_flags: tuple[str, ...] = ()  # of the command that `compose` begins

    def run(self, *args: str, timeout_s: float = QUICK_S) -> subprocess.CompletedProcess[str]:
        return _run([self.name, *args], timeout_s)

    def answer(self, *args: str, timeout_s: float = QUICK_S) -> str:
        """What the command prints. Fails the test with what it says on stderr."""
        done = self.run(*args, timeout_s=timeout_s)
        assert done.returncode == 0, f"{self.name} {shlex.join(args)}: {done.stderr}"
        return done.stdout.strip()

    def has_or_gets(self, image: str) -> bool:
        """Whether the image lies here or its registry gives it."""
        if self.run("image", "inspect", image).returncode == 0:
            return True
        return self.run("pull", "--quiet", image, timeout_s=PULL_S).returncode == 0

    def is_healthy(self, container: str) -> bool:
        """By the container's own health check. Without systemd nobody runs it for podman, so it is run here."""
        if self.name == "podman":
            return self.run("healthcheck", "run", container).returncode == 0
        return self.answer("inspect", "--format", "{{.State.Health.Status}}", container) == "healthy"

    def process_of(self, container: str) -> int:
        """Number of the first process outside of the container; 0 while it does not run."""
        done = self.run("inspect", "--format", "{{.State.Pid}}", container)
        return int(done.stdout) if done.returncode == 0 else 0

    def kill_9(self, container: str) -> None:
        """SIGKILL from outside, as the kernel would send it, so that the restart policy has to act.

        Where the process cannot be reached (a virtual machine, another user), the engine kills it; an engine takes that
        for a wish and starts nothing again, so that is done here.
        """
        process = self.process_of(container)
        assert process, f"{container} does not run"
        if _is_of_container(process, container):
            try:
                os.kill(process, signal.SIGKILL)
                return
            except PermissionError:
                pass
        self.answer("kill", "--signal", "KILL", container)
        self.answer("start", container)


def find_engine() -> Engine:
    """Raises NoEngine."""
    if _works("docker", "compose", "version") and _works("docker", "info"):
        return Engine("docker", ("docker", "compose"))
    here = Path(sys.executable).parent / "podman-compose"
    compose = str(here) if here.exists() else shutil.which("podman-compose")
    if compose is None or not _works("podman", "info"):
        raise NoEngine(MISSING)
    flags = os.environ.get("PODMAN_BUILD_ARGS", "")
    return Engine("podman", (compose,), (f"--podman-build-args={flags}",) if flags else ())


def _works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and _run(list(command), QUICK_S).returncode == 0


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def _is_of_container(process: int, container: str) -> bool:
    """The number may be one of a virtual machine's, and another process's here: its control group tells."""
    try:
        return container in Path(f"/proc/{process}/cgroup").read_text()
    except OSError:
        return False
