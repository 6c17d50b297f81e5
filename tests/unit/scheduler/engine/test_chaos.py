"""Random arrivals, cancels, tiny pools, restarts and lost messages: every law holds after every event, every request
has one outcome, what completes is what a single machine would say, and in the end everything has been given back."""

from __future__ import annotations

from random import Random

import pytest

from coppice.messages.index import Grant
from coppice.messages.step import RefusalCode
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import Lease, LeaseTable
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import Sequence
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_world import MS, World

STOPS = frozenset({7})
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(2, 15))]
ABORTED = OutputError(OutputErrorCode.ABORTED, "aborted")


def build(seed: int) -> World:
    random = Random(seed)
    settings = SchedulerSettings(
        instance=b"instance",
        max_step_tokens=random.choice([8, 24, 64]),
        max_running=8,
        max_chunk_tokens=random.choice([3, 16, 64]),
        queue_timeout_ms=400,
        max_steps_in_flight=random.choice([1, 2, 3]),
        extend_ahead_blocks=random.choice([0, 1, 2]),
        worker_absent_ms=60,
    )
    world = World(settings, FakeIndex(4, domain_blocks_max=random.choice([8, 1000])), seed)
    world.index.disabled.add("z")
    world.step_us = random.choice([0, 1_000, 3_000])  # several decode steps in a plan, where they are known to be short
    world.index.max_sequences = random.choice([0, 0, 1, 3])  # `check` sees that no worker is given more
    for name in "ab"[: random.choice([1, 2])]:
        world.add_worker(name, random.choice([8, 14, 40]))
    world.attach_index()
    return world


class Chaos:
    """What may happen to a world, by name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.count = 0
        self.lost_workers: set[str] = set()

    def submit(self, size: int = 1) -> None:
        prompt = [self.random.randrange(2) for _ in range(self.random.randrange(1, 24))]
        domain = self.random.choice("xyz")
        leader, streams = f"r{self.count + 1}", self.random.random() < 0.7
        for _ in range(size):
            self.count += 1
            name, max_new = f"r{self.count}", self.random.randrange(1, 12)
            self.world.submit(
                name,
                prompt,
                max_new,
                domain=domain,
                seed=self.count,
                stops=STOPS,
                fork_of=leader if name != leader else None,
                priority=self.random.choice([0, 0, 1]),
                streams=streams,
                deadline_ns=self.world.now_ns + self.random.choice([2, 50]) * MS
                if self.random.random() < 0.1
                else None,
            )

    def submit_forks(self) -> None:
        self.submit(self.random.randrange(2, 5))

    def cancel(self) -> None:
        if self.count:
            self.world.cancel(f"r{self.random.randrange(1, self.count + 1)}")

    def abort(self) -> None:
        """Several in one turn, as the answers of one call end."""
        for number in range(self.count, max(self.count - 4, 0), -1):
            if f"r{number}" in self.world.outcomes:
                self.world.end(f"r{number}", ABORTED)
        self.world.poke()

    def worker_restart(self) -> None:
        name = self.random.choice(sorted(self.world.workers))
        if name not in self.lost_workers:
            self.lost_workers.add(name)
            self.world.restart_worker(name)
            self.world.after(4, lambda: self.lost_workers.discard(name))

    def worker_gone(self) -> None:
        """Nobody listens where it was, and then somebody does: a new process, or the old one, of which that was not
        true."""
        name = self.random.choice(sorted(self.world.workers))
        if name not in self.lost_workers:
            self.lost_workers.add(name)
            self.world.lose_worker(name)
            self.world.miss_worker(name)
            is_new = self.random.random() < 0.5

            def back() -> None:
                if is_new:
                    self.world.restart_worker(name)
                    self.world.after(4, lambda: self.lost_workers.discard(name))
                else:
                    self.lost_workers.discard(name)
                    self.world.attach_worker(name, fresh=False)

            self.world.after(self.random.choice([1, 5, 100]), back)

    def worker_blip(self) -> None:
        name = self.random.choice(sorted(self.world.workers))
        if name not in self.lost_workers:
            self.lost_workers.add(name)
            self.world.lose_worker(name)

            def back() -> None:
                self.lost_workers.discard(name)
                self.world.attach_worker(name, fresh=False)

            self.world.after(self.random.choice([1, 5, 100]), back)

    def index_blip(self) -> None:
        if self.world.index_up:
            self.world.lose_index()
            self.world.after(self.random.choice([0.2, 5]), lambda: self.world.attach_index(fresh=False))

    def index_link_restart(self) -> None:
        if self.world.index_up:
            self.world.lose_index()
            self.world.after(self.random.choice([0.2, 5]), self.world.attach_index)

    def index_restart(self) -> None:
        if self.world.index_up:
            self.world.lose_index()
            self.world.index.restart()
            self.world.after(self.random.choice([0.2, 5]), self.world.attach_index)

    def session_lost(self) -> None:
        if self.world.index_up:
            self.world.lose_index()
            self.world.new_session()
            self.world.after(self.random.choice([0.2, 5]), self.world.attach_index)

    def refusal(self) -> None:
        worker = self.world.workers[self.random.choice(sorted(self.world.workers))]
        worker.refuse_next.append(self.random.choice(list(RefusalCode)))

    def heartbeat(self) -> None:
        if self.world.index_up:
            self.world.tell(self.world.index.digest())


def play(seed: int, actions: list[str], steps: int) -> World:
    world = build(seed)
    chaos = Chaos(world)
    now_ms = 0.0
    for _ in range(steps):
        now_ms += world.random.choice([0.05, 0.5, 3])
        world.run(until_ms=now_ms)
        getattr(chaos, world.random.choice(actions))()
    world.run()
    world.tell(world.index.digest())
    world.run()
    return world


def assert_settled(world: World, may_refuse: frozenset[RefusalCode] = frozenset()) -> None:
    assert world.core.is_idle()
    assert not world.index.leases
    for worker in world.workers.values():
        assert not worker.residents
        assert set(worker.refused) <= may_refuse, "the worker refused what was not planted"
    for request_id, outcome in world.outcomes.items():
        assert outcome.last is not None, request_id
        assert outcome.last.finish is not None, request_id
        expected, stopped = outcome.expected()
        if outcome.last.finish in (Finish.STOP, Finish.LENGTH):
            assert outcome.tokens == expected
            assert bool(outcome.last.stop_token) == stopped


CALM = ["submit"] * 4 + ["submit_forks", "cancel", "heartbeat"]
WORKER_FAULTS = [*CALM, "worker_restart", "worker_blip", "worker_gone", "refusal"]
INDEX_FAULTS = [*CALM, "index_blip", "index_link_restart", "index_restart"]
ALL_FAULTS = [*WORKER_FAULTS, *INDEX_FAULTS, "session_lost"]


@pytest.mark.parametrize("seed", SEEDS)
def test_calm_world_completes_every_request(seed: int) -> None:
    world = play(seed, CALM, 60)
    assert_settled(world)
    errors = [o.last.error for o in world.outcomes.values() if o.last is not None and o.last.error is not None]
    expected = {"never_fits", "queue_timeout", "tenant_maximum", "deadline"}
    assert not [error for error in errors if error.code.value not in expected]


# A link that restarts loses seals on their way to the scheduler; blocks without them are refused, and computed again.
SEALS_LOST = frozenset({RefusalCode.WRONG_SEAL})
# A planted refusal may be that of a sequence that others copy from.
SOURCE_LOST = frozenset({RefusalCode.LOST_SOURCE})


@pytest.mark.parametrize("seed", SEEDS)
def test_worker_faults(seed: int) -> None:
    assert_settled(play(seed, WORKER_FAULTS, 60), SOURCE_LOST)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_faults(seed: int) -> None:
    assert_settled(play(seed, INDEX_FAULTS, 60), SEALS_LOST)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_faults(seed: int) -> None:
    assert_settled(play(seed, ALL_FAULTS, 80), SEALS_LOST | SOURCE_LOST)


@pytest.mark.parametrize("seed", SEEDS)
def test_aborted_calls(seed: int) -> None:
    world = play(seed, [*ALL_FAULTS, "abort", "abort", "submit_forks"], 80)
    assert_settled(world, SEALS_LOST | SOURCE_LOST)
    ends = [outcome.last for outcome in world.outcomes.values()]
    assert [end for end in ends if end is not None and end.error == ABORTED]


@pytest.mark.wide
def test_forks_copy_and_do_without() -> None:
    worlds = [play(seed, CALM, 60) for seed in range(7)]
    assert sum(worker.num_copies for world in worlds for worker in world.workers.values()) > 10
    for world in worlds:
        assert_settled(world)


# --- the fakes see a rule that is broken


def test_an_early_release_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Lifecycle.close

    def hasty(self: Lifecycle, sequence: Sequence) -> None:
        close(self, sequence)
        self.release(sequence.lease)

    monkeypatch.setattr(Lifecycle, "close", hasty)
    with pytest.raises(AssertionError, match="released before it was removed"):
        play(1, CALM, 60)


def test_an_early_publish_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = LeaseTable.filled

    def hasty(self: LeaseTable, lease: Lease, num_computed: int) -> None:
        filled(self, lease, num_computed + lease.block_size)

    monkeypatch.setattr(LeaseTable, "filled", hasty)
    with pytest.raises(AssertionError, match="published before"):
        play(1, CALM, 60)


def test_a_row_without_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    take_grant = Lease.take_grant

    def generous(self: Lease, grant: Grant, block_size: int) -> None:
        take_grant(self, grant, block_size)
        self.reserved_tokens += block_size

    monkeypatch.setattr(Lease, "take_grant", generous)
    monkeypatch.setattr(SchedulerCore, "check", lambda self: None)  # the worker must see it without
    with pytest.raises(AssertionError, match="a row without a block"):
        play(1, CALM, 60)
