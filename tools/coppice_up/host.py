"""Where children run: what each needs, the place that it gets, and what can be asked of it there.

    needs ──► Host.place ──► places ──► plan ──► specs ──► Host.start ──► Child     the supervisor asks and tells it
                                                               └── LocalHost: this machine
                                                                   RayHost: nodes of a Ray cluster (`on_ray`)

A plan is written when all places are known, since children are told each other's addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from coppice.addresses import Address, SessionAddress, UnixAddress
from coppice_up.checkpoint import Checkpoint
from coppice_up.probe import Probe


@dataclass(frozen=True, slots=True)
class PortNeed:
    """A port by what it is for, `flag` is what a user chooses it with. `number`: what a user has chosen; 0: `usual` if
    nobody has it, else any free one. `host` "": the address of the place."""

    name: str
    host: str = ""
    number: int = 0
    usual: int = 0
    flag: str = ""


class Program(Enum):
    """What runs a child: a path that each machine knows for itself."""

    PYTHON = "Python"
    VALKEY = "Valkey"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a child must have where it runs.

    `group`: children of one group run on one machine; groups are spread. `cpus` and `gpus` are reserved where the host
    knows of such a thing. `files` must exist. `redis_url`: a Redis of the user's that must answer. `leader`: as
    `ChildSpec` has it.
    """

    name: str
    group: str
    leader: str = ""
    ports: tuple[PortNeed, ...] = ()
    cpus: float = 0.0
    gpus: int = 0
    files: tuple[Path, ...] = ()
    redis_url: str = ""
    program: Program = Program.PYTHON


@dataclass(frozen=True, slots=True)
class Place:
    """Where a child runs.

    `node`: the machine, for people; empty for this one. `program`: path of what runs it. `addresses`: where it listens,
    by the name of the need. `folder`: for its log and files. `socket_dir`: where all children are on one machine, a
    folder for the sockets of their sessions.
    """

    node: str
    program: str
    addresses: Mapping[str, Address]
    folder: Path
    socket_dir: Path | None
    checkpoint: Checkpoint

    def sessions(self, name: str) -> SessionAddress:
        """Where the child of that name accepts sessions."""
        if self.socket_dir is not None:
            return UnixAddress(f"{self.socket_dir}/{name}")
        return self.addresses["sessions"]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to tell that it is ready.

    `probe` is asked where the child runs. `role`: children of one role stand in for each other; empty where nobody
    does for this one. `stop_grace_s`: from SIGTERM to SIGKILL. `stop_turn`: children of turn 0 are stopped first,
    together. `moved`: the same child in another place; None where others were told its address.

    Of a worker on several nodes, `leader` names its first child at all others, which live and die with that one.
    `meets_at`: where they meet it. `led`: the same child of a leader that is met elsewhere.
    """

    name: str
    argv: tuple[str, ...]
    probe: Probe
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    stop_grace_s: float = 5.0
    stop_turn: int = 0
    moved: Callable[[Place], ChildSpec] | None = None
    leader: str = ""
    meets_at: Address | None = None
    led: Callable[[Address], ChildSpec] | None = None

    @property
    def whole(self) -> str:
        """The name of what it is a part of, or is."""
        return self.leader or self.name


class Child(Protocol):
    """A started `ChildSpec`. No method waits for the child, `kill` aside."""

    @property
    def spec(self) -> ChildSpec:
        """As it runs now: another one than it was started with where it has moved."""

    @property
    def node(self) -> str:
        """The machine where it runs, for people; empty for this one."""

    def is_running(self) -> bool:
        """Also while it is being started again. Raises UnavailableError when it can never run again."""

    def is_ready(self) -> bool:
        """Whether it runs, and its probe says so."""

    def describe_exit(self) -> str:
        """Of a child that has ended: `exit code 1`, `killed by SIGKILL`, or that its node is gone."""

    def restart(self, spec: ChildSpec | None = None) -> None:
        """Only when it has ended; as `spec` says from now on. Its log goes on."""

    def terminate(self) -> None:
        """Ask it to stop. A process that is gone already is not an error."""

    def kill(self) -> None:
        """And with it what it started."""

    def new_lines(self) -> list[str]:
        """Lines that its log got since the last call."""

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines of its log; none when there is no log."""


class Host(Protocol):
    """Runs children somewhere. Must be closed, whatever was done with it."""

    def place(self, needs: Sequence[Needs]) -> dict[str, Place]:
        """A place for each, by its name; called once. Raises UsageError and UnavailableError for what cannot be had:
        a checkpoint, a port, a file, room."""

    def start(self, spec: ChildSpec) -> Child:
        """Start what has been given a place."""

    def close(self, *, keep_logs: bool) -> None:
        """Give the places back; once more does nothing. Children have ended, or end now. Only logs stay in folders."""
