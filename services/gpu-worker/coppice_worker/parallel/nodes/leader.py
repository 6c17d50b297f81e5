"""Rank 0 of a worker on several machines.

    wait for all nodes and their ranks -> meet -> each loads its share -> all have the same facts -> compute

A rank on this machine is a process that is watched; its link goes over a pair of sockets. Of the others rank 0 has
links alone. The first that is lost ends this process with exit code 1, and with it all links, and so all nodes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from coppice.edge.told_once import Outage
from coppice.edge.wire import Wire
from coppice.tls.credentials import Credentials
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.loading import Compute, Loaded
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.edge.watchdog import exit_now
from coppice_worker.parallel.errors import LinkLost, StoppedEarly, TermsDiffer
from coppice_worker.parallel.executor import TensorParallelExecutor
from coppice_worker.parallel.invitation import Group, Invitation, SeveralMachines
from coppice_worker.parallel.nodes.handshake import Comer
from coppice_worker.parallel.nodes.link import Kind, Link
from coppice_worker.parallel.nodes.listener import LOOK_S, TOLD_AFTER_S, TOLD_AGAIN_S, NodeListener
from coppice_worker.parallel.nodes.member import meet
from coppice_worker.parallel.nodes.store import MeetingStore, MeetingValues
from coppice_worker.parallel.nodes.terms import difference, facts_of, read_facts, terms_of
from coppice_worker.parallel.processes import START_GRACE_S, STOP_WAIT_S, RankProcesses, part
from coppice_worker.parallel.tiers import SharedOutTiers

_log = logging.getLogger(__name__)


class LeadingNode:
    """All other ranks, on this machine and others, as `processes.Ranks` are on one. Raises what `NodeListener` does.

    Start it on a thread that lives as long as the process.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        tls: Credentials | None,
        stopping: StopRequests,
        end: Callable[[], None] = exit_now,
    ) -> None:
        """`settings` come from `resolve_settings`. `end` ends this process at once."""
        self._settings = settings
        self._stopping_requests = stopping
        self._end = end
        self._stopping = threading.Event()
        self._is_loaded = False
        self._is_lost = threading.Lock()  # taken by the first loss
        self._values = MeetingValues()
        self._links: dict[int, Link] = {}  # of ranks
        self._nodes: dict[int, Link] = {}
        self._facts: dict[int, dict[str, str]] = {}  # by rank
        self._group: Group | None = None
        self._processes = RankProcesses()
        self._listener = NodeListener(settings, terms_of(settings), tls, stopping, self._taken, self._lost)
        if tls is not None:
            _log.warning("sums between nodes are not encrypted: let nobody else into the network between them")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._listener.close()
        self.stop() if error is None or isinstance(error, StoppedEarly) else self._kill_all()

    def join(self) -> Group:
        """Rank 0's place in the group, when all ranks are here. Raises StoppedEarly."""
        self._listener.wait()
        for rank in self._settings.ranks_here[1:]:
            self._spawn(rank)
        self._processes.watch(self._ended)
        self._group = meet(self._settings, 0, MeetingStore(self._values.ask), self._listener.host)
        return self._group

    def lead(self, loaded: Loaded) -> Compute:
        """All ranks together, when rank 0's own share is loaded. Waits for those of the others; raises TermsDiffer,
        StoppedEarly."""
        self._wait_for_facts()
        ours = facts_of(loaded)
        for rank, facts in sorted(self._facts.items()):
            if differs := difference(ours, facts, "rank 0", f"rank {rank}"):
                raise TermsDiffer(differs, hint="give all nodes the same flags, build and kind of machine")
        self._is_loaded = True
        executor = TensorParallelExecutor(loaded.executor, {rank: link.commands for rank, link in self._links.items()})
        copies = {rank: link.copies for rank, link in self._links.items()}
        tiers = loaded.host and SharedOutTiers(loaded.host, copies, lambda: executor.num_told)
        return Compute(executor, tiers, self._end_all)

    def stop(self) -> None:
        """Let the ranks finish what they were told, and end."""
        self._stopping.set()
        for link in (*self._nodes.values(), *self._links.values()):
            link.bid_farewell()
        if self._group is not None:
            part(self._group)
        self._processes.wait(STOP_WAIT_S)
        self._processes.kill_all()

    # ---- on threads of links ----

    def _taken(self, comer: Comer, link: Link) -> None:
        if comer.rank is None:
            self._nodes[comer.node] = link
            link.on(Kind.STOP, lambda _: self._stop_requested(link.peer))
            link.on(Kind.CUT, lambda _: self._stopping_requests.cut())
        else:
            self._serve(comer.rank, link)

    def _serve(self, rank: int, link: Link) -> None:
        self._links[rank] = link
        self._values.serve(link)
        link.on(Kind.LOADED, lambda facts: self._facts.__setitem__(rank, read_facts(facts)))

    def _stop_requested(self, peer: str) -> None:
        _log.info("%s was told to stop, and so is the worker", peer)
        self._stopping_requests.ask_too()

    def _lost(self, who: str, how: str) -> None:
        """A link ended. What is wrong with a checkpoint rank 0 finds as well, and says it better."""
        if self._stopping.wait(0.0 if self._is_loaded else START_GRACE_S):
            return
        if self._is_lost.acquire(blocking=False):
            _log.critical("%s is lost: %s; the worker cannot compute without it and ends", who, how)
            self._end_all()

    # ---- ranks of this machine ----

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = SeveralMachines(host=self._listener.host, descriptor=theirs.fileno())
            invitation = Invitation(
                rank=rank, size=self._settings.tensor_parallel, place=place, settings=self._settings
            )
            self._processes.spawn(invitation, (theirs.fileno(),))
        link = Link(Wire(ours), f"rank {rank}")
        self._serve(rank, link)

        def run() -> None:
            try:
                link.run()
            except LinkLost as error:
                if self._processes.wait_for(rank, STOP_WAIT_S) is None:  # else its end says more
                    self._lost(f"rank {rank}", str(error))

        threading.Thread(target=run, name=f"link of rank {rank}", daemon=True).start()

    def _ended(self, rank: int, code: int) -> None:
        if self._stopping.wait(0.0 if self._is_loaded else START_GRACE_S):
            return
        if self._is_lost.acquire(blocking=False):
            self._processes.log_end(rank, code)
            self._end_all()

    def _wait_for_facts(self) -> None:
        outage = Outage(TOLD_AFTER_S, TOLD_AGAIN_S)
        while missing := [f"rank {rank}" for rank in sorted(self._links) if rank not in self._facts]:
            if outage.lasts_s(time.monotonic(), "loading") is not None:
                _log.info("waiting for %s to load", ", ".join(missing))
            if self._stopping_requests.asked.wait(LOOK_S):
                raise StoppedEarly(f"told to stop while waiting for {', '.join(missing)}")

    def _end_all(self) -> None:
        self._kill_all()
        self._end()

    def _kill_all(self) -> None:
        self._stopping.set()
        self._processes.kill_all()
