"""What a new rank is told: who it is, what to load, how commands come, and how it meets the others."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.gloo_group import GlooGroup
from coppice_worker.parallel.memory_group import MemoryGroup
from coppice_worker.parallel.torch_group import TorchGroup, store_in

Group = MemoryGroup | TorchGroup | GlooGroup


class MeetInMemory(BaseModel):
    """In shared memory. Numbers are file descriptors that the process inherits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: int
    peers: dict[int, int]  # by rank

    def join(self, rank: int, size: int) -> MemoryGroup:
        assert len(self.peers) == size - 1
        peers = {peer: socket.socket(fileno=descriptor) for peer, descriptor in self.peers.items()}
        return MemoryGroup(rank, peers, self.memory)


class MeetOnGpus(BaseModel):
    """Through NCCL. Ranks find each other in a folder that nobody else may open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path

    def join(self, rank: int, size: int) -> TorchGroup:
        """Blocks until all ranks have come."""
        return TorchGroup(rank, size, store_in(self.folder, size), device=rank)


class OneMachine(BaseModel):
    """All ranks are here. Numbers are descriptors of sockets to rank 0 that the process inherits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channel: int  # on which commands come
    copies: int  # and those for copies between the tiers, which go beside them
    meeting: MeetInMemory | MeetOnGpus


class SeveralMachines(BaseModel):
    """Commands, copies and the store of the meeting go over one link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str  # of this machine, where other ranks reach this one
    descriptor: int | None = None  # of a socket to rank 0 on this machine; None: rank 0 is on another one
    life: str = ""  # of the worker, as node 0 named it


class Invitation(BaseModel):
    """The one argument of a rank's process, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    size: int
    place: OneMachine | SeveralMachines
    settings: WorkerSettings
