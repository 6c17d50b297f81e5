"""`python -m coppice_worker.parallel.rank INVITATION`: a rank other than 0; rank 0 or its node starts these.

It loads its share of the model and does what rank 0 says, until that closes the channel.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading

import torch

from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError, run_main
from coppice.garbage import shorten_pauses
from coppice.telemetry.logs import configure_logging
from coppice_worker.edge.copies.copier import TierCopier
from coppice_worker.edge.loading import Loaded, load
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.parallel.channels import Channel
from coppice_worker.parallel.errors import RankLost
from coppice_worker.parallel.follower import follow, follow_copies
from coppice_worker.parallel.invitation import Group, Invitation, SeveralMachines
from coppice_worker.parallel.nodes.member import Membership
from coppice_worker.parallel.tiers import Progress

_log = logging.getLogger(__name__)
PROG = "python -m coppice_worker"
END_WAIT_S = 3.0  # until rank 0, which hears of every end, ends this one


def main() -> int:
    invitation = Invitation.model_validate_json(sys.argv[1])
    return run_main(f"{PROG}: rank {invitation.rank}", lambda: run(invitation))


def run(invitation: Invitation) -> int:
    configure_logging(invitation.settings.log_level, invitation.settings.log_format)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Named(invitation.rank))
    place = invitation.place
    if isinstance(place, SeveralMachines):
        return _run_among_machines(invitation, Membership(invitation, place))
    with socket.socket(fileno=place.channel) as channel, socket.socket(fileno=place.copies) as copies:
        try:
            group = place.meeting.join(invitation.rank, invitation.size)
            loaded = load(invitation.settings, group)
            compute(invitation, group, loaded, channel, copies)
        except CoppiceError as error:
            # Rank 0 says what is wrong with the model, as it finds the same, and who was lost. If it cannot, we do.
            if ended_within(channel, END_WAIT_S):
                return EXIT_OK if isinstance(error, RankLost) else EXIT_FAILURE
            raise
    return EXIT_OK


def _run_among_machines(invitation: Invitation, member: Membership) -> int:
    """A link that is lost ends this process meanwhile. A failure here is for this machine's log: rank 0 has another."""
    group = member.join()
    loaded = load(invitation.settings, group)
    member.say_loaded(loaded)
    compute(invitation, group, loaded, member.link.commands, member.link.copies)
    return EXIT_OK if member.ended_in_order(END_WAIT_S) else EXIT_FAILURE


def compute(invitation: Invitation, group: Group, loaded: Loaded, channel: Channel, copies: Channel) -> None:
    """Until the channel is closed; then leave the group."""
    shorten_pauses()
    serve(invitation, loaded, channel, copies)
    gc.unfreeze()  # what holds graphs is garbage now
    loaded.executor.close()
    group.close()


def serve(invitation: Invitation, loaded: Loaded, channel: Channel, copies: Channel) -> None:
    """Until the channel is closed."""
    progress = Progress()

    def copy(tiers: TierCopier) -> None:
        try:
            if invitation.settings.device == "cuda":
                device = invitation.settings.device_of(invitation.rank)
                torch.cuda.set_device(device)  # each thread begins with device 0
            follow_copies(tiers, copies, progress)
        except Exception:
            _log.exception("the copies failed")
            exit_now()

    if loaded.host is not None:
        threading.Thread(target=copy, args=(loaded.host,), name="copies", daemon=True).start()
    follow(loaded.executor, channel, progress)


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
