"""Starts the other ranks of a worker, watches them, ends them.

A worker lives and dies as a whole: when a rank ends, or hangs, the worker process says which and ends with exit code 1.
It does so at once, as a sum that waits for that rank can be neither interrupted nor finished; no state is lost, since
everything on the devices dies with the worker's epoch anyway.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from coppice.processes.child_process import describe_exit, tethered
from coppice_worker.edge.loading import Compute, Loaded
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.parallel.errors import RankLost
from coppice_worker.parallel.executor import TensorParallelExecutor
from coppice_worker.parallel.invitation import Group, Invitation, MeetInMemory, MeetOnGpus, OneMachine
from coppice_worker.parallel.memory_group import MemoryGroup, create_shared_memory
from coppice_worker.parallel.tiers import SharedOutTiers

_log = logging.getLogger(__name__)
STOP_WAIT_S = 5.0
START_GRACE_S = 5.0  # what is wrong with a checkpoint rank 0 finds as well, and says it better


class RankProcesses:
    """Ranks that are processes of this machine.

    Start them on a thread that lives as long as the process: the kernel ties them to that thread.
    """

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def spawn(self, invitation: Invitation, descriptors: Sequence[int]) -> None:
        command = (sys.executable, "-m", "coppice_worker.parallel.rank", invitation.model_dump_json())
        self._processes[invitation.rank] = subprocess.Popen(
            tethered(command),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            # A session of its own: Ctrl-C in a terminal is for rank 0, which ends the others in order.
            start_new_session=True,
        )

    def watch(self, ended: Callable[[int, int], None]) -> None:
        """Call `ended` with rank and exit code of each, on a thread of its own."""

        def wait(rank: int, process: subprocess.Popen[bytes]) -> None:
            ended(rank, process.wait())

        for rank, process in self._processes.items():
            threading.Thread(target=wait, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def describe(self, rank: int) -> str:
        """Which process it is, for a person."""
        return f"rank {rank} (process {self._processes[rank].pid})"

    def is_here(self, rank: int) -> bool:
        return rank in self._processes

    def log_end(self, rank: int, code: int) -> None:
        text = "%s ended: %s; the worker cannot compute without it and ends"
        _log.critical(text, self.describe(rank), describe_exit(code))

    def wait(self, wait_s: float) -> None:
        """For all, each so long at most."""
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)

    def wait_for(self, rank: int, wait_s: float) -> int | None:
        """Its exit code; None: it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[rank].wait(wait_s)
        return None

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()


def part(group: Group) -> None:
    """Leave the group. To part may mean to wait for each other, and there is no way to stop that."""
    parting = threading.Thread(target=group.close, name="parting", daemon=True)
    parting.start()
    parting.join(STOP_WAIT_S)


class Ranks:
    """Ranks 1 to `settings.tensor_parallel` - 1 of a worker on one machine, and the place of rank 0 among them.

    Start it on a thread that lives as long as the process.
    """

    def __init__(self, settings: WorkerSettings, end: Callable[[], None] = exit_now) -> None:
        """`settings.device` is "cpu" or "cuda". `end` ends this process at once."""
        self._settings = settings
        self._size = settings.tensor_parallel
        self._end = end
        self._stopping = threading.Event()
        self._is_loaded = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes = RankProcesses()
        self._channels: dict[int, socket.socket] = {}
        self._copies: dict[int, socket.socket] = {}
        self._meeting = self._start()
        self._group: Group | None = None
        self._processes.watch(self._ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RankLost) and (code := self._processes.wait_for(error.rank, STOP_WAIT_S)) is not None:
            self._processes.log_end(error.rank, code)
        if error is None:
            self.stop()
        else:
            self._stopping.set()
            self._kill_all()

    def join(self) -> Group:
        """Rank 0's place in the group; the others wait for it where they meet through NCCL."""
        self._group = self._meeting.join(0, self._size)
        return self._group

    def lead(self, loaded: Loaded) -> Compute:
        """All ranks together, when rank 0's own share is loaded."""
        self._is_loaded = True
        executor = TensorParallelExecutor(loaded.executor, self._channels)
        tiers = loaded.host and SharedOutTiers(loaded.host, self._copies, lambda: executor.num_told)
        return Compute(executor, tiers, self._hung)

    def stop(self) -> None:
        """Let the ranks finish what they were told, and end."""
        self._stopping.set()
        for channel in (*self._channels.values(), *self._copies.values()):
            channel.close()
        if self._group is not None:
            part(self._group)
        self._processes.wait(STOP_WAIT_S)
        self._kill_all()

    # ---- starting ----

    def _start(self) -> MeetInMemory | MeetOnGpus:
        """Starts the processes; where rank 0 meets them."""
        others = range(1, self._size)
        if self._settings.device == "cuda":
            self._folder = tempfile.TemporaryDirectory(prefix="coppice-ranks-")
            meeting = MeetOnGpus(folder=Path(self._folder.name))
            for rank in others:
                self._spawn(rank, meeting, [])
            return meeting
        memory = create_shared_memory(self._size)
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(self._size)}
        for a, b in itertools.combinations(range(self._size), 2):
            ends[a][b], ends[b][a] = socket.socketpair()
        for rank in others:
            peers = {peer: end.fileno() for peer, end in ends[rank].items()}
            self._spawn(rank, MeetInMemory(memory=memory, peers=peers), [memory, *peers.values()])
        for rank in others:
            for end in ends[rank].values():
                end.close()
        return MeetInMemory(memory=memory, peers={peer: end.detach() for peer, end in ends[0].items()})

    def _spawn(self, rank: int, meeting: MeetInMemory | MeetOnGpus, descriptors: list[int]) -> None:
        self._channels[rank], channel = socket.socketpair()
        self._copies[rank], copies = socket.socketpair()
        with channel, copies:
            place = OneMachine(channel=channel.fileno(), copies=copies.fileno(), meeting=meeting)
            invitation = Invitation(rank=rank, size=self._size, place=place, settings=self._settings)
            self._processes.spawn(invitation, (channel.fileno(), copies.fileno(), *descriptors))

    # ---- watching ----

    def _hung(self) -> None:
        """A step takes too long: says for whom rank 0 waits, if it knows, and ends everything."""
        if isinstance(self._group, MemoryGroup) and (rank := self._group.waits_for) is not None:
            _log.critical("%s did not do its share", self._processes.describe(rank))
        self._end_all()

    def _ended(self, rank: int, code: int) -> None:
        if self._stopping.wait(0.0 if self._is_loaded else START_GRACE_S):
            return
        self._processes.log_end(rank, code)
        self._end_all()

    def _end_all(self) -> None:
        self._kill_all()
        self._end()

    def _kill_all(self) -> None:
        self._processes.kill_all()
        if self._folder is not None:
            self._folder.cleanup()
