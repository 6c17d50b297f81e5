"""Owners at random: whoever comes, goes, drains or is asked, shares are as even as whole workers can make them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coppice.ids import SchedulerEpoch, WorkerId
from coppice.messages.ownership import Yielded
from coppice.messages.registration import Draining
from tests.unit.cache.world import World, registration

NAMES = ("a", "b", "c", "d", "e")
SESSIONS_MAX = 3
Event = tuple[str, str, int, int, bool]  # what happens, to which worker, to which session, blocks, whether it drains
EVENTS = st.tuples(
    st.sampled_from(["drains", "ceases", "leaves", "registers", "attaches", "ends", "is lost"]),
    st.sampled_from(NAMES),
    st.integers(0, SESSIONS_MAX - 1),
    st.sampled_from([4, 8, 12]),
    st.booleans(),
)


class Shared:
    """What workers said of draining, beside a core that hears it. Two schedulers and all workers are there at first."""

    def __init__(self) -> None:
        self.world = World()
        self.sessions: list[SchedulerEpoch] = [self.world.attach() for _ in range(2)]
        self.drains: dict[str, bool] = {}
        for name in NAMES:
            self.happens("registers", name, 0, 8, False)

    def happens(self, what: str, name: str, number: int, num_blocks: int, draining: bool) -> None:
        core, now_ns = self.world.core, self.world.now_ns
        known, worker_id = name in self.drains, WorkerId(name)
        if what == "attaches" and len(self.sessions) < SESSIONS_MAX:
            self.sessions.append(self.world.attach())
        elif what == "ends" and number < len(self.sessions):
            core.end_client(self.sessions.pop(number), now_ns)
        elif what == "registers":
            self.drains[name] = draining
            self.world.register(replace(registration(worker_id, num_blocks=num_blocks), draining=draining))
        elif what == "drains" and known:
            self.drains[name] = True
            core.receive_worker(worker_id, Draining(core.state.workers[worker_id].epoch), now_ns)
        elif what == "ceases" and known:
            self.drains[name] = False
            worker = core.state.workers[worker_id]
            epochs = {"epoch": worker.epoch, "highest": 1}
            self.world.register(registration(worker_id, num_blocks=worker.num_blocks, **epochs))
        elif what == "is lost" and known:
            del self.drains[name]
            core.end_worker(worker_id, now_ns)
        elif what == "leaves" and known:
            self.leaves(worker_id)
        self.world.collect()
        self.check()

    def leaves(self, worker_id: WorkerId) -> None:
        worker = self.world.core.state.workers[worker_id]
        self.world.core.receive_client(worker.owner, Yielded(worker_id, worker.epoch), self.world.now_ns)

    def check(self) -> None:
        """Each worker has an owner where there is a session, and nobody is asked for one that drains."""
        workers = self.world.core.state.workers
        assert workers.keys() == self.drains.keys()
        for worker_id, worker in workers.items():
            assert worker.owner in self.sessions or not self.sessions
            assert not (worker.yields and self.drains[worker_id])

    def settle(self) -> None:
        """Who is asked leaves, until nobody is."""
        workers, num_left = self.world.core.state.workers, 0
        while asked := [worker_id for worker_id, worker in workers.items() if worker.yields]:
            self.leaves(asked[0])
            self.world.collect()
            num_left += 1
            assert num_left <= len(workers) * SESSIONS_MAX

    def check_even(self) -> None:
        """No worker that takes new requests would bring two sums of such blocks nearer to each other."""
        workers = self.world.core.state.workers
        owned = dict.fromkeys(self.sessions, 0)
        taking = [worker for worker_id, worker in workers.items() if not self.drains[worker_id]]
        for worker in taking:
            owned[worker.owner] += worker.num_blocks
        for worker in taking:
            assert owned[worker.owner] - min(owned.values()) <= worker.num_blocks


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_shares_of_workers_that_do_not_drain_are_even_and_no_other_is_asked_for(events: list[Event]) -> None:
    shared = Shared()
    for event in events:
        shared.happens(*event)
    if shared.sessions:
        shared.settle()
        shared.check_even()
