"""What can be wrong with a checkpoint or its device, said so that the owner can mend it.

    coppice.errors.UsageError
    +-- CheckpointError      the files do not describe a model that this worker can run
    +-- PoolTooSmall         the device has no room for the blocks that a step needs

A hub that cannot be reached is `coppice.errors.UnavailableError`.
"""

from __future__ import annotations

from pathlib import Path

from coppice.errors import UsageError


class CheckpointError(UsageError):
    """A checkpoint cannot be used: names the file, what in it is wrong, and in `hint` what to do about it."""

    def __init__(self, file: Path | str, problem: str, advice: str) -> None:
        super().__init__(f"{file}: {problem}", hint=advice)
        self.file = str(file)


class PoolTooSmall(UsageError):
    """Beside the weights and a largest step there is no room on the device: says how much is missing."""
