"""What can go wrong between ranks.

coppice.errors.CoppiceError
+-- RankLost      a rank ended, or did not come to where the others wait for it
+-- LinkLost      a connection between two nodes is over
+-- NodeRefused   node 0 does not take this node, or the other way round
+-- StoppedEarly  the process was told to end before all nodes had met; an end in order
"""

from __future__ import annotations

from coppice.errors import EXIT_OK, EXIT_USAGE, CoppiceError


class RankLost(CoppiceError):
    """A rank of this worker is gone or hangs; no other can go on without it."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}", hint="the worker's other ranks end with it; start the worker again")
        self.rank = rank


class LinkLost(CoppiceError):
    """The other side of a link is gone; the text says how that was found."""


class NodeRefused(CoppiceError):
    """What two nodes have to have in common, they do not; or whoever answers is no worker."""


class TermsDiffer(NodeRefused):
    """Flags, files or builds of two nodes differ."""

    exit_code = EXIT_USAGE


class StoppedEarly(CoppiceError):
    """Nothing ran yet."""

    exit_code = EXIT_OK
