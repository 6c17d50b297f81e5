"""What can go wrong between ranks.

coppice.errors.CoppiceError
+-- RankLost      a rank ended, or did not come to where the others wait for it
"""

from __future__ import annotations

from coppice.errors import CoppiceError


class RankLost(CoppiceError):
    """A rank of this worker is gone or hangs; no other can go on without it."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}", hint="the worker's other ranks end with it; start the worker again")
        self.rank = rank
