"""The process of a node other than 0: joins, starts the ranks of its machine, and ends with the first that is lost.

waits for node 0 ──► is taken ──► its ranks join and compute ──► farewell of node 0 ──► exit 0
SIGTERM meanwhile: node 0 is told, lets what runs end, and bids farewell
node 0 or a rank is lost ──► the others end ──► exit 1: who starts it again has it join the next life
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import TypeVar

from coppice.errors import EXIT_FAILURE, EXIT_OK
from coppice.tls.credentials import Credentials
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.errors import LinkLost
from coppice_worker.parallel.invitation import Invitation
from coppice_worker.parallel.nodes.link import Kind, Link
from coppice_worker.parallel.nodes.member import join_as_node
from coppice_worker.parallel.processes import STOP_WAIT_S, RankProcesses

_log = logging.getLogger(__name__)
LOOK_S = 0.2
NODE_0_GRACE_S = 1.0  # a rank that ends with node 0 may be faster to do so than this process hears of that
_FAREWELL = ""
_End = TypeVar("_End")


def run_node(settings: WorkerSettings, tls: Credentials | None, stopping: StopRequests) -> int:
    """The exit code. `settings` come from `resolve_settings`. Raises NodeRefused, StoppedEarly."""
    link, place = join_as_node(settings, tls, stopping)
    _log.info("node %d is one of %d, with node 0 at %s", settings.node_rank, settings.nnodes, settings.meets_at)
    processes = RankProcesses()
    for rank in settings.ranks_here:
        processes.spawn(Invitation(rank=rank, size=settings.tensor_parallel, place=place, settings=settings), ())
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()  # rank, exit code
    of_node_0: SimpleQueue[str] = SimpleQueue()
    processes.watch(lambda rank, code: ends.put((rank, code)))
    threading.Thread(target=_run_link, args=(link, of_node_0), name="link", daemon=True).start()
    try:
        return _until_the_end(processes, ends, of_node_0, link, stopping)
    finally:
        processes.kill_all()


def _run_link(link: Link, ends: SimpleQueue[str]) -> None:
    try:
        link.run()
        ends.put(_FAREWELL)
    except LinkLost as error:
        ends.put(str(error))


def _until_the_end(
    processes: RankProcesses,
    ends: SimpleQueue[tuple[int, int]],
    of_node_0: SimpleQueue[str],
    link: Link,
    stopping: StopRequests,
) -> int:
    told: set[Kind] = set()
    while True:
        ended = _next(ends, LOOK_S)
        said = _next(of_node_0, NODE_0_GRACE_S if ended else 0.0)
        if said == _FAREWELL:
            processes.wait(STOP_WAIT_S)
            link.close()
            return EXIT_OK
        ended = ended or _next(ends, 0.0)
        # One that was killed may be why node 0 ended; one that ends by itself may do so because of that.
        if ended is not None and (said is None or ended[1] < 0):
            processes.log_end(*ended)
        if said is not None:
            _log.critical("%s is lost: %s; this node ends with it", link.peer, said)
        if said is not None or ended is not None:
            return EXIT_FAILURE
        wanted = {Kind.STOP} if stopping.asked.is_set() else set()
        if stopping.cuts_within(0.0):
            wanted.add(Kind.CUT)
        for kind in sorted(wanted - told):
            link.send(kind)
        told |= wanted


def _next(queue: SimpleQueue[_End], wait_s: float) -> _End | None:
    try:
        return queue.get(wait_s > 0, wait_s or None)
    except Empty:
        return None
