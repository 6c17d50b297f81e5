"""`python -m coppice_worker.parallel.rank INVITATION`: a rank other than 0; only rank 0 starts these.

It loads its share of the model and does what rank 0 says, until that closes the channel.
"""

from __future__ import annotations

import logging
import socket
import sys

from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError, run_main
from coppice.telemetry import configure_logging
from coppice_worker.core.batch import Executor, StepBatch
from coppice_worker.edge.loading import load

from .commands import CopyBlocks, ZeroBlocks, receive
from .errors import RankLost
from .invitation import Invitation

_log = logging.getLogger(__name__)
PROG = "python -m coppice_worker"
END_WAIT_S = 3.0  # until rank 0, which hears of every end, ends this one


def main() -> int:
    invitation = Invitation.model_validate_json(sys.argv[1])
    return run_main(f"{PROG}: rank {invitation.rank}", lambda: run(invitation))


def run(invitation: Invitation) -> int:
    configure_logging(invitation.settings.log_level)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Named(invitation.rank))
    with socket.socket(fileno=invitation.channel) as channel:
        try:
            group = invitation.meeting.join(invitation.rank, invitation.size)
            follow(load(invitation.settings, group).executor, channel)
        except CoppiceError as error:
            # Rank 0 says what is wrong with the model, as it finds the same, and who was lost. If it cannot, we do.
            if ended_within(channel, END_WAIT_S):
                return EXIT_OK if isinstance(error, RankLost) else EXIT_FAILURE
            raise
    return EXIT_OK


def follow(executor: Executor, channel: socket.socket) -> None:
    """Do what comes on the channel until it is closed."""
    while (command := receive(channel)) is not None:
        match command:
            case ZeroBlocks(block_ids):
                executor.zero_blocks(block_ids)
            case CopyBlocks(src, dst):
                executor.copy_blocks(src, dst)
            case StepBatch():
                executor.execute(command)


def ended_within(channel: socket.socket, wait_s: float) -> bool:
    """Whether the other end closes the channel; what still comes on it is for nobody."""
    channel.settimeout(wait_s)
    try:
        while channel.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class _Named(logging.Filter):
    """All ranks write to one log."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._prefix = f"rank {rank}: "

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"{self._prefix}{record.msg}"
        return True


if __name__ == "__main__":
    sys.exit(main())
