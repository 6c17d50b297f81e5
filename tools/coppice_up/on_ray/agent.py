"""An actor on a node: chooses a place for one child there, starts it, and says how it stands."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from coppice import __version__
from coppice.addresses import Address
from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice_up.checkpoint import find_checkpoint
from coppice_up.child import LocalChild
from coppice_up.host import ChildSpec, Needs, Place
from coppice_up.local_host import check_files, choose_addresses, program_path
from coppice_up.ports import PortClaims

LINES_MAX = 500  # of one answer


@dataclass(frozen=True, slots=True)
class Ask:
    """`stack` names a folder of the stack on each node, where the user has named none in `log_dir`. `version`: of who
    asks."""

    needs: Needs
    model: str
    stack: str
    log_dir: Path | None
    version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of ours as a value: Ray would wrap an exception."""

    what: str
    hint: str
    is_usage: bool

    def error(self) -> CoppiceError:
        return (UsageError if self.is_usage else UnavailableError)(self.what, hint=self.hint)


@dataclass(frozen=True, slots=True)
class Status:
    """Of the child; `exit` says how it ended. `lines` are those that its log got since the last time."""

    is_running: bool
    is_ready: bool
    exit: str
    lines: tuple[str, ...]


class Agent:
    """Holds one child. Ray starts another agent when this one or its node dies; that one begins without a child."""

    def __init__(self) -> None:
        # The kernel ties a child to the thread that starts it, and no other of an actor's threads lives as long.
        assert threading.current_thread() is threading.main_thread()
        self._child: LocalChild | None = None
        self._held: list[socket.socket] = []
        self._claims = PortClaims()
        self._folder: Path | None = None

    def place(self, ask: Ask) -> Place | Refused:
        """Choose ports of this node and hold them until `start`."""
        import ray

        node = ray.util.get_node_ip_address()
        try:
            if ask.version != __version__:
                raise UnavailableError(
                    f"coppice is {__version__}, here {ask.version}", hint="install one version everywhere"
                )
            checkpoint = find_checkpoint(ask.model)
            check_files([ask.needs])
            program = program_path(ask.needs.program)
            self._release()
            self._claims.close()
            addresses = choose_addresses([ask.needs], self._claims, node)[ask.needs.name]
            self._held = [_held(address) for address in addresses.values()]
            folder = _log_dir(ask.log_dir) if ask.log_dir is not None else _private_folder(ask.stack)
        except (CoppiceError, OSError) as error:
            return _refused(node, error)
        self._folder = None if ask.log_dir is not None else folder
        return Place(node, program, addresses, folder, None, checkpoint)

    def start(self, spec: ChildSpec) -> Refused | None:
        """Start the child on the ports that were held for it.

        An earlier child may still run, where this node was out of reach and came back. It goes on if its command is the
        same. Else it is ended first: its leader has moved, and it would wait for it at the old address.
        """
        self._release()
        if self._child is not None and self._child.is_running():
            if self._child.spec.argv == spec.argv:
                return None
            self._child.kill()
        try:
            if self._child is None:
                self._child = LocalChild(spec)
            else:
                self._child.restart(spec)
        except OSError as error:
            return Refused(f"cannot start {spec.name}: {error}", "", is_usage=False)
        return None

    def status(self, look_for_readiness: bool) -> Status | None:
        """None while no child was started here."""
        child = self._child
        if child is None:
            return None
        is_running = child.is_running()
        lines = tuple(child.new_lines()[-LINES_MAX:])
        return Status(
            is_running=is_running,
            is_ready=look_for_readiness and child.is_ready(),
            exit="" if is_running else child.describe_exit(),
            lines=lines,
        )

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def clean(self, keep_logs: bool) -> None:
        """End what runs. The folder goes, unless the user has named it or logs are to be kept."""
        self.kill()
        self._release()
        self._claims.close()
        if self._folder is not None and not keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self) -> None:
        for each in self._held:
            each.close()
        self._held = []


def new_stack_name() -> str:
    return f"coppice-up-{secrets.token_hex(8)}"


def _held(address: Address) -> socket.socket:
    """Bound, so that no other agent of this node chooses the same port."""
    held = socket.socket(address.family)
    held.bind((address.host, address.port))
    return held


def _private_folder(name: str) -> Path:
    """Shared by the agents of a stack on a node, closed to other users. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _log_dir(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _refused(node: str, error: CoppiceError | OSError) -> Refused:
    if isinstance(error, CoppiceError):
        return Refused(f"on node {node}: {error.what}", error.hint, isinstance(error, UsageError))
    return Refused(f"on node {node}: {error}", "", is_usage=False)
