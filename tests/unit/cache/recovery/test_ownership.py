"""Which scheduler plans for which worker: even shares, by its owner's leave or after its end, and never else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import SchedulerEpoch, WorkerId
from coppice.messages.index import Grant, NoCapacity, WorkerInfo, Workers
from coppice.messages.ownership import SessionName, Succeed, Yielded
from coppice.messages.registration import Draining, Owner, Registered
from coppice_cache.core.base.results import SessionEnded, ToWorkerEffect
from tests.unit.cache.restart import S1, Pool, Restarted
from tests.unit.cache.world import V, W, World, registration, tokens

X, Y = WorkerId("x"), WorkerId("y")


def owner(world: World, worker_id: WorkerId) -> SchedulerEpoch:
    return world.core.state.workers[worker_id].owner


def listed(world: World, session: SchedulerEpoch) -> dict[WorkerId, tuple[bool, bool]]:
    """As the session heard last: by worker, whether it owns it and whether it is to let it go."""
    said = [message for message in world.told(session) if isinstance(message, Workers)]
    return {info.worker_id: (info.is_owned, info.yields) for info in said[-1].workers}


def infos(world: World, session: SchedulerEpoch) -> tuple[WorkerInfo, ...]:
    """Workers as the session heard of them last."""
    return [message for message in world.told(session) if isinstance(message, Workers)][-1].workers


def told_owners(world: World, worker_id: WorkerId) -> list[SchedulerEpoch]:
    said = [effect for effect in world.log if isinstance(effect, ToWorkerEffect) and effect.worker_id == worker_id]
    return [effect.message.owner for effect in said if isinstance(effect.message, Owner | Registered)]


def leave(world: World, session: SchedulerEpoch, worker_id: WorkerId) -> None:
    epoch = world.core.state.workers[worker_id].epoch
    world.core.receive_client(session, Yielded(worker_id, epoch), world.now_ns)
    world.collect()


def say_drains(world: World, worker_id: WorkerId, *, says: str = "a word") -> None:
    worker = world.core.state.workers[worker_id]
    if says == "a word":
        world.core.receive_worker(worker_id, Draining(worker.epoch), world.now_ns)
        world.collect()
    else:
        register_again(world, worker_id, draining=True)


def register_again(world: World, worker_id: WorkerId, *, draining: bool) -> None:
    """Under its epoch."""
    worker = world.core.state.workers[worker_id]
    generations = worker.ledger.generation.tobytes()
    message = registration(
        worker_id, num_blocks=worker.num_blocks, epoch=worker.epoch, highest=1, generations=generations
    )
    world.register(replace(message, draining=draining))
    assert world.core.state.workers[worker_id] is worker


def asked_for(world: World) -> list[WorkerId]:
    return [worker_id for worker_id, worker in sorted(world.core.state.workers.items()) if worker.yields]


def two_and_two() -> World:
    """The session has both workers, and a second one has come."""
    world = World(num_blocks=8)
    world.register(registration(V))
    world.attach()
    return world


def test_the_only_scheduler_has_all_workers_and_the_workers_hear_of_it() -> None:
    world = World(num_blocks=8)
    world.register(registration(V))
    assert listed(world, world.session) == {W: (True, False), V: (True, False)}
    assert told_owners(world, W)[-1] == told_owners(world, V)[-1] == world.session


def test_a_second_scheduler_gets_its_share_when_the_first_has_left_it() -> None:
    world = two_and_two()
    first, second = sorted(world.core.state.sessions)
    (wanted,) = [worker_id for worker_id, (_, yields) in listed(world, first).items() if yields]
    assert owner(world, wanted) == first, "as long as it has not left"
    assert not any(owned for owned, _ in listed(world, second).values())
    leave(world, second, wanted)
    assert owner(world, wanted) == first, "nobody leaves for another"
    leave(world, first, wanted)
    assert owner(world, wanted) == second
    assert listed(world, second)[wanted] == (True, False)
    assert listed(world, first)[wanted] == (False, False)
    assert told_owners(world, wanted)[-1] == second


def test_a_scheduler_that_does_not_know_owners_is_asked_for_nothing_and_does_without_what_it_does_not_own() -> None:
    world = World(num_blocks=8)
    world.core.end_client(world.session, world.now_ns)
    world.register(registration(V))
    older = world.attach(may_yield=False)
    newer = world.attach()
    assert listed(world, older) == {W: (True, False), V: (True, False)}, "it would never say that it has left one"
    world.register(registration(X))
    assert owner(world, X) == newer
    (info,) = [info for info in infos(world, older) if info.worker_id == X]
    assert info.draining, "what is listed is its own to it, so nothing new may begin there"
    assert not info.voucher, "and a worker that does not know owners must not believe it"
    assert all(info.voucher and not info.draining for info in infos(world, newer))
    world.core.end_client(newer, world.now_ns)
    world.collect()
    assert all(info.voucher and not info.draining for info in infos(world, older)), "its own by now"


def test_where_who_has_most_cannot_be_asked_the_next_one_is() -> None:
    world = World(num_blocks=8)
    world.core.end_client(world.session, world.now_ns)
    older = world.attach(may_yield=False)
    for name in (V, X, Y):
        world.register(registration(name))
    second = world.attach()
    world.register(registration(WorkerId("z")))
    world.register(registration(WorkerId("z2")))
    assert [owner(world, name) for name in (W, V, X, Y)] == [older] * 4
    world.attach()
    assert sum(yields for _, yields in listed(world, second).values()) == 1
    assert not any(yields for _, yields in listed(world, older).values())


@pytest.mark.parametrize("knows_owners", [False, True])
def test_a_worker_that_does_not_know_owners_is_given_to_a_newer_session_alone(knows_owners: bool) -> None:
    """It takes plans of the newest that attached, and would refuse an older one."""
    world = World(num_blocks=8)
    second = world.attach()
    for name in (V, X):
        world.register(replace(registration(name, num_blocks=4), knows_owners=knows_owners))
    assert [owner(world, name) for name in (W, V, X)] == [world.session, second, second]
    world.core.end_worker(W, world.now_ns)
    world.collect()
    assert sum(yields for _, yields in listed(world, second).values()) == knows_owners
    world.core.end_client(world.session, world.now_ns)
    third = world.attach()
    assert sum(yields for _, yields in listed(world, second).values()) == 1, f"{third} is newer"


# --- workers that drain


@pytest.mark.parametrize("says", ["a word", "a registration"])
def test_a_scheduler_all_of_whose_workers_drain_gets_another_and_gives_one_back_when_they_cease_to(says: str) -> None:
    world = World(num_blocks=8)
    first, second = world.session, world.attach()
    for name in (V, X, Y):
        world.register(registration(name, num_blocks=8))
    assert [owner(world, name) for name in (W, V, X, Y)] == [first, second, first, second]
    say_drains(world, V, says=says)
    assert asked_for(world) == [], "one of its two is left to it"
    say_drains(world, Y, says=says)
    (wanted,) = asked_for(world)
    leave(world, first, wanted)
    assert owner(world, wanted) == second
    assert {owner(world, name) for name in (V, Y)} == {second}, "what runs there is its own"
    register_again(world, V, draining=False)
    assert asked_for(world) == []
    register_again(world, Y, draining=False)
    (too_much,) = asked_for(world)
    leave(world, second, too_much)
    assert sorted(owner(world, name) for name in (W, V, X, Y)) == [first, first, second, second]


def test_nobody_is_asked_for_a_worker_that_drains() -> None:
    world = World(num_blocks=8)
    world.register(registration(V, num_blocks=8))
    world.register(registration(X, num_blocks=4))
    say_drains(world, X)
    world.attach()
    assert asked_for(world) == [V], "the smallest would be asked for first"


def test_one_that_is_asked_for_and_begins_to_drain_stays_and_another_one_is_asked_for() -> None:
    world = World(num_blocks=8)
    for name in (V, X):
        world.register(registration(name, num_blocks=8))
    first, second = world.session, world.attach()
    assert asked_for(world) == [V]
    say_drains(world, V)
    assert asked_for(world) == [W]
    leave(world, first, V)
    assert owner(world, V) == first, "said before it heard so"
    assert listed(world, first)[V] == (True, False)
    leave(world, first, W)
    assert owner(world, W) == second


def test_one_that_registers_as_draining_has_an_owner_and_is_nobodys_share() -> None:
    world = World(num_blocks=8)
    first, second = world.session, world.attach()
    world.register(replace(registration(V, num_blocks=8), draining=True))
    assert owner(world, V) == second
    world.register(registration(X, num_blocks=8))
    assert [owner(world, name) for name in (W, X)] == [first, second]


def test_where_all_workers_drain_nobody_is_asked_for_any_and_those_of_who_ends_go_to_the_other() -> None:
    world = World(num_blocks=8)
    for name in (V, X):
        world.register(registration(name, num_blocks=8))
    for name in (W, V, X):
        say_drains(world, name)
    second = world.attach()
    assert asked_for(world) == []
    world.core.end_client(world.session, world.now_ns)
    world.collect()
    assert {owner(world, name) for name in (W, V, X)} == {second}


def test_nothing_is_granted_where_it_is_to_be_left_and_what_is_there_keeps_it() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(8))
    world.register(registration(V))
    world.attach()
    first = min(world.core.state.sessions)
    (wanted,) = [worker_id for worker_id, (_, yields) in listed(world, first).items() if yields]
    if wanted == W:
        assert isinstance(world.acquire(2, tokens(8, 900)), NoCapacity)
        leave(world, first, W)
        assert owner(world, W) == first, "a lease is there"
        world.release(1)
        leave(world, first, W)
        assert owner(world, W) != first


def test_the_end_of_a_scheduler_gives_its_workers_to_the_other_behind_a_fence() -> None:
    world = two_and_two()
    first, second = sorted(world.core.state.sessions)
    world.session = first
    world.core.end_client(first, world.now_ns)
    world.collect()
    assert owner(world, W) == owner(world, V) == second
    assert all(fence.scheduler_epochs == (first,) for fence in world.fences())


def test_who_wanted_a_worker_and_is_gone_gets_none() -> None:
    world = two_and_two()
    first, second = sorted(world.core.state.sessions)
    world.core.end_client(second, world.now_ns)
    world.collect()
    assert listed(world, first) == {W: (True, False), V: (True, False)}


def test_one_that_stands_by_takes_over_from_one_that_is_silent() -> None:
    world = World(num_blocks=8)
    first, second = world.session, world.attach()
    assert owner(world, W) == first
    world.tick(2_500, alive=(second,))
    assert SessionEnded(first) in world.log
    assert owner(world, W) == second


def test_without_one_that_stands_by_silence_costs_nothing_before_the_session_expires() -> None:
    world = World(num_blocks=8)
    world.tick(9_000)
    assert SessionEnded(world.session) not in world.log


def test_after_a_restart_the_owner_of_before_stays_it() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1)
    world.open()
    assert owner(world, W) == S1


def test_a_newcomer_waits_for_the_owner_of_before_until_the_window_is_over() -> None:
    world = Restarted(Pool(), S1)
    newcomer = world.attach()
    assert owner(world, W) == S1
    world.tick(10_100, alive=(newcomer,))
    assert owner(world, W) == newcomer


# --- successors: a scheduler that is gone for good

KEY, INCARNATION = b"k" * 16, 77


def name_of(world: World, epoch: SchedulerEpoch) -> SessionName:
    voucher = world.core.state.vouchers.of_session(KEY, INCARNATION, epoch)
    return SessionName(KEY, INCARNATION, epoch, voucher)


def succeed(world: World, by: SchedulerEpoch, name: SessionName) -> None:
    world.core.receive_client(by, Succeed(name), world.now_ns)
    world.collect()


def test_the_session_ends_at_once_and_its_blocks_come_back_through_the_fence() -> None:
    world = World(num_blocks=8)
    lost = world.session
    world.granted(1, tokens(32))
    world.session = world.attach()
    assert isinstance(world.acquire(2, tokens(32, 900)), NoCapacity)
    succeed(world, world.session, name_of(world, lost))
    assert SessionEnded(lost) in world.log
    (fence,) = world.fences()
    assert fence.scheduler_epochs == (lost,)
    assert isinstance(world.acquire(2, tokens(32, 900)), NoCapacity), "nothing is granted before the worker's word"
    world.ack(fence)
    assert isinstance(world.acquire(3, tokens(32, 900)), Grant)
    succeed(world, world.session, name_of(world, lost))
    assert not world.fences()[1:], "said again, it has no effect"


@pytest.mark.parametrize("wrong", [{"voucher": b"v" * 16}, {"key": b"q" * 16}, {"incarnation": 78}, {"voucher": b""}])
def test_without_the_words_that_it_was_told_nothing_ends(wrong: dict[str, object]) -> None:
    world = World(num_blocks=8)
    other = world.attach()
    succeed(world, other, replace(name_of(world, world.session), **wrong))  # type: ignore[arg-type]
    assert not world.fences()
    assert world.attach(world.session) == world.session


def test_who_names_its_own_session_says_goodbye() -> None:
    world = World(num_blocks=8)
    left = world.session
    succeed(world, left, SessionName(KEY, 0, left, b""))
    assert SessionEnded(left) in world.log
    assert world.attach(left) != left


def test_after_a_restart_nobody_waits_for_it_any_more() -> None:
    world = Restarted(Pool(), S1)
    assert not world.fences(), "its window is open"
    successor = world.attach()
    succeed(world, successor, name_of(world, S1))
    (fence,) = world.fences()
    assert S1 in fence.scheduler_epochs
    assert world.attach(S1) != S1, "it is dead"
