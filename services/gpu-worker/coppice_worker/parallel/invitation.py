"""What a new rank is told: who it is, what to load, and through which descriptors it meets the others."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.memory_group import MemoryGroup
from coppice_worker.parallel.torch_group import TorchGroup

Group = MemoryGroup | TorchGroup


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
        return TorchGroup(rank, size, self.folder)


class Invitation(BaseModel):
    """The one argument of a rank's process, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    size: int
    channel: int  # descriptor of the socket on which commands come
    copies: int  # and of that for copies between the tiers, which go beside them
    meeting: MeetInMemory | MeetOnGpus
    settings: WorkerSettings
