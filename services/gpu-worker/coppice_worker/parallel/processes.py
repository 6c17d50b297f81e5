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
from collections.abc import Callable
from pathlib import Path
from typing import Self

from coppice.processes.child_process import describe_exit, tethered
from coppice_worker.edge.loading import Compute, Loaded
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.parallel.errors import RankLost
from coppice_worker.parallel.executor import TensorParallelExecutor
from coppice_worker.parallel.invitation import Group, Invitation, MeetInMemory, MeetOnGpus
from coppice_worker.parallel.memory_group import MemoryGroup, create_shared_memory
from coppice_worker.parallel.tiers import SharedOutTiers

_log = logging.getLogger(__name__)
STOP_WAIT_S = 5.0
START_GRACE_S = 5.0  # what is wrong with a checkpoint rank 0 finds as well, and says it better


class Ranks:
    """Ranks 1 to `settings.tensor_parallel` - 1, and the place of rank 0 among them.

    Start it on a thread that lives as long as the process: the kernel ties the processes to that thread.
    """

    def __init__(self, settings: WorkerSettings, end: Callable[[], None] = exit_now) -> None:
        """`settings.device` is "cpu" or "cuda". `end` ends this process at once."""
        self._settings = settings
        self._size = settings.tensor_parallel
        self._end = end
        self._stopping = threading.Event()
        self._is_loaded = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, socket.socket] = {}
        self._copies: dict[int, socket.socket] = {}
        self._meeting = self._start()
        self._group: Group | None = None
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RankLost):
            process = self._processes[error.rank]
            with contextlib.suppress(subprocess.TimeoutExpired):
                _log_end(error.rank, process, process.wait(STOP_WAIT_S))
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
            # To part means to wait for each other, and there is no way to stop that.
            parting = threading.Thread(target=self._group.close, name="parting", daemon=True)
            parting.start()
            parting.join(STOP_WAIT_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_WAIT_S)
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
            invitation = Invitation(
                rank=rank,
                size=self._size,
                channel=channel.fileno(),
                copies=copies.fileno(),
                meeting=meeting,
                settings=self._settings,
            )
            command = (sys.executable, "-m", "coppice_worker.parallel.rank", invitation.model_dump_json())
            self._processes[rank] = subprocess.Popen(
                tethered(command),
                stdin=subprocess.DEVNULL,
                pass_fds=(channel.fileno(), copies.fileno(), *descriptors),
                # A session of its own: Ctrl-C in a terminal is for rank 0, which ends the others in order.
                start_new_session=True,
            )

    # ---- watching ----

    def _hung(self) -> None:
        """A step takes too long: says for whom rank 0 waits, if it knows, and ends everything."""
        if isinstance(self._group, MemoryGroup) and (rank := self._group.waits_for) is not None:
            _log.critical("rank %d (process %d) did not do its share", rank, self._processes[rank].pid)
        self._end_all()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._stopping.wait(0.0 if self._is_loaded else START_GRACE_S):
            return
        _log_end(rank, process, code)
        self._end_all()

    def _end_all(self) -> None:
        self._kill_all()
        self._end()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        if self._folder is not None:
            self._folder.cleanup()


def _log_end(rank: int, process: subprocess.Popen[bytes], code: int) -> None:
    text = "rank %d (process %d) ended: %s; the worker cannot compute without it and ends"
    _log.critical(text, rank, process.pid, describe_exit(code))
