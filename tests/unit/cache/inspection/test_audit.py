"""Audits in slices: what is broken and stays is found whatever happens meanwhile, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId
from coppice.messages.index import Grant, Published
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.base.settings import DomainConfig
from coppice_cache.core.inspection.audit import Looked
from coppice_cache.core.inspection.audit_walk import Marks
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.ledger import BlockState
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.workers import Worker
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, tokens
from tests.unit.cache.world import settings as core_settings

BOB = DomainId("bob")
BLOCK = 4
FAR = 900_000  # tokens that no operation between slices uses


class Traffic:
    """One operation after the other, of every kind, on a small pool; never checked in between."""

    def __init__(self, seed: int, *, num_blocks: int = 48) -> None:
        config = core_settings(DomainConfig(ALICE, guarantee_share=0.25), DomainConfig(BOB, maximum_share=0.75))
        self.world = World(config, num_blocks=num_blocks, block_size=BLOCK)
        self.random = random.Random(seed)
        self.live: dict[int, tuple[bytes, DomainId]] = {}
        self._next = 10

    @property
    def worker(self) -> Worker:
        return self.world.core.state.workers[W]

    def prompt(self) -> bytes:
        """Few beginnings, so that edges are shared, split and grown."""
        kinds = [tokens(BLOCK, 100 * self.random.randrange(3)) for _ in range(self.random.randrange(1, 6))]
        return b"".join(kinds) + tokens(1, 5_000 + self.random.randrange(9))

    def step(self) -> None:
        self.world.now_ns += 1_000_000
        self.random.choice([self.acquire, self.acquire, self.publish, self.publish, self.release, self.other])()
        for fence in self.world.fences():
            if fence.fence_id in self.worker.fences:
                self.world.ack(fence)
        self.world.core.take_effects()

    def acquire(self) -> None:
        data, domain = self.prompt(), self.random.choice((ALICE, BOB))
        self._next += 1
        reserve = len(data) // 4 + self.random.randrange(9)
        if isinstance(self.world.acquire(self._next, data, domain=domain, reserve=reserve), Grant):
            self.live[self._next] = (data, domain)

    def publish(self) -> None:
        if self.live:
            number = self.random.choice(list(self.live))
            data, _ = self.live[number]
            whole = len(data) // (4 * BLOCK) * 4 * BLOCK
            self.world.publish(number, 0, data[:whole])

    def release(self) -> None:
        if self.live:
            number = self.random.choice(list(self.live))
            del self.live[number]
            self.world.release(number)

    def other(self) -> None:
        core, now_ns = self.world.core, self.world.now_ns
        kind = self.random.randrange(6)
        if kind == 0:
            core.invalidate(now_ns=now_ns, domain=self.random.choice((ALICE, BOB)))
        elif kind == 1:
            core.invalidate(now_ns=now_ns, domain=ALICE, namespace=NAMESPACE, tokens=self.prompt()[:-4])
        elif kind == 2:
            core.pin("p", ALICE, NAMESPACE, tokens(BLOCK, 0), now_ns)
        elif kind == 3:
            core.unpin("p", now_ns)
        else:
            self.world.core.heard_worker(W, now_ns)
            self.world.core.heard_client(self.world.session, now_ns)
            core.tick(now_ns)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worlds here are broken on purpose, so nobody but the audit looks."""
    monkeypatch.setattr(World, "collect", lambda world: world.log.extend(world.core.take_effects()) or world.log)
    for name, value in (("_NODES_PER_STEP", 1), ("_KEYS_PER_STEP", 1)):
        monkeypatch.setattr(f"coppice_cache.core.inspection.audit_walk.{name}", value)
    monkeypatch.setattr("coppice_cache.core.inspection.audit_walk._SUSPECTS_PER_STEP", 1)
    monkeypatch.setattr("coppice_cache.core.inspection.audit._FEW", 1)
    monkeypatch.setattr("coppice_cache.core.inspection.audit._BLOCKS_PER_STEP", 8)
    monkeypatch.setattr("coppice_cache.core.inspection.audit._LEASES_PER_STEP", 1)


def run_audit(traffic: Traffic, between: Callable[[], None]) -> Looked:
    looked = Looked()
    for _ in traffic.world.core.audit(looked):
        between()
    return looked


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), steps=st.integers(0, 60), chance=st.sampled_from([0.05, 0.3, 1.0]))
def test_no_false_alarm_whatever_happens_between_slices(seed: int, steps: int, chance: float) -> None:
    traffic = Traffic(seed)
    for _ in range(steps):
        traffic.step()
    for _ in range(2):
        run_audit(traffic, lambda: traffic.step() if traffic.random.random() < chance else None)
    traffic.world.core.check()


def far(traffic: Traffic) -> tuple[Node, Lease]:
    """A cached leaf, and a lease with blocks of its own that a pin of another node protects; nobody touches either."""
    here = traffic.world
    here.fill(1, tokens(3 * BLOCK, FAR))
    here.granted(2, tokens(2 * BLOCK, FAR + 500) + tokens(1, 1), reserve=4 * BLOCK)
    assert isinstance(here.publish(2, 0, tokens(2 * BLOCK, FAR + 500)), Published)
    tree = traffic.worker.trees[ALICE, NAMESPACE]
    leaf = tree.children[tokens(BLOCK, FAR)]
    return leaf, next(lease for lease in traffic.worker.leases.values() if lease.lease_id == lease_id(2))


def block_of(handles: bytes | bytearray, index: int) -> int:
    return int.from_bytes(handles[8 * index : 8 * index + 8], "little") & 0xFFFFFF


def give_to_nobody(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.state[worker.num_blocks - 1] = BlockState.CACHED


def lease_to_nobody(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.state[worker.num_blocks - 1] = BlockState.LEASED


def drop_the_node(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.trees[ALICE, NAMESPACE].unlist_child(leaf.tokens[: 4 * BLOCK], leaf)


def move_the_node(worker: Worker, leaf: Node, lease: Lease) -> None:
    tree = worker.trees[ALICE, NAMESPACE]
    tree.unlist_child(leaf.tokens[: 4 * BLOCK], leaf)
    tree.list_child(tokens(BLOCK, FAR + 77), leaf)


def cache_twice(worker: Worker, leaf: Node, lease: Lease) -> None:
    other = lease.node
    other.handles = leaf.handles[: len(other.handles)]


def free_the_cached(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.state[block_of(leaf.handles, 1)] = BlockState.FREE


def grant_the_cached(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.generation[block_of(leaf.handles, 2)] += 1


def unseal_the_cached(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.set_seal(block_of(leaf.handles, 0), bytes(16))


def seal_the_leased(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.set_seal(block_of(lease.table, 2), b"s" * 16)


def change_the_owner(worker: Worker, leaf: Node, lease: Lease) -> None:
    owners = worker.ledger.owners
    owners.index[block_of(leaf.handles, 0)] = owners.index_of(worker.quotas.accounts[BOB])


def free_the_leased(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.state[block_of(lease.table, 3)] = BlockState.FREE


def pin_for_nobody(worker: Worker, leaf: Node, lease: Lease) -> None:
    leaf.pin(10**9)


def guard_for_nothing(worker: Worker, leaf: Node, lease: Lease) -> None:
    leaf.guards += 1


def lose_the_pin(worker: Worker, leaf: Node, lease: Lease) -> None:
    lease.node.unpin(lease.number)


def miscount_protected(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.quotas.accounts[ALICE].protected += 1


def settle_too_much(worker: Worker, leaf: Node, lease: Lease) -> None:
    lease.num_settled -= 1


def forget_the_leaf(worker: Worker, leaf: Node, lease: Lease) -> None:
    leaf.unlink()


def miscount_cached(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.quotas.accounts[ALICE].cached += 1


def miscount_blocks(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.ledger.counts[0] += 1


def list_free_twice(worker: Worker, leaf: Node, lease: Lease) -> None:
    free = worker.ledger.free
    free.popleft()
    free.append(int(free.blocks()[-1]))


def drain_without_a_fence(worker: Worker, leaf: Node, lease: Lease) -> None:
    lease.draining = True


def lend_too_much(worker: Worker, leaf: Node, lease: Lease) -> None:
    worker.quotas.lendable += 3


FAULTS: tuple[tuple[Callable[[Worker, Node, Lease], None], str], ...] = (
    (give_to_nobody, "I1"),
    (lease_to_nobody, "I1"),
    (drop_the_node, "I1"),
    (move_the_node, "I11"),
    (cache_twice, "I8"),
    (free_the_cached, "I1"),
    (grant_the_cached, "I5"),
    (unseal_the_cached, "I8"),
    (seal_the_leased, "I7"),
    (change_the_owner, "I3"),
    (free_the_leased, "I1"),
    (pin_for_nobody, "I2"),
    (guard_for_nothing, "I2"),
    (lose_the_pin, "I2"),
    (miscount_protected, "I2"),
    (settle_too_much, "I"),  # the block after it is sealed and published: whichever is seen first
    (forget_the_leaf, "I11"),
    (miscount_cached, "I1"),
    (miscount_blocks, "I1"),
    (list_free_twice, "I1"),
    (drain_without_a_fence, "I2"),
    (lend_too_much, "I14"),
)


@pytest.mark.parametrize(("plant", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_that_does_not_move_is_found(plant: Callable[[Worker, Node, Lease], None], name: str) -> None:
    """Matches and heartbeats go on meanwhile; more would run into what is broken."""
    traffic = Traffic(1, num_blocks=400)
    for _ in range(40):
        traffic.step()
    run_audit(traffic, traffic.step)
    leaf, lease = far(traffic)
    plant(traffic.worker, leaf, lease)
    with pytest.raises(InvariantBroken) as caught:
        run_audit(traffic, lambda: _look(traffic))
    assert caught.value.name.startswith(name)
    with pytest.raises(InvariantBroken):
        traffic.world.core.check()


def _look(traffic: Traffic) -> None:
    traffic.world.core.match(ALICE, NAMESPACE, traffic.prompt(), W)
    traffic.world.core.tree(ALICE, max_depth=9, limit=99)


@pytest.mark.parametrize(
    "plant", [drop_the_node, unseal_the_cached, change_the_owner, forget_the_leaf, guard_for_nothing, seal_the_leased]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_is_found_under_load(plant: Callable[[Worker, Node, Lease], None], seed: int) -> None:
    traffic = Traffic(seed, num_blocks=400)
    for _ in range(40):
        traffic.step()
    leaf, lease = far(traffic)
    plant(traffic.worker, leaf, lease)
    kinds = (traffic.acquire, traffic.publish, traffic.release)
    with pytest.raises(InvariantBroken):
        run_audit(traffic, lambda: traffic.random.choice(kinds)())


def test_a_count_of_nodes_that_is_wrong_is_found_when_it_is_quiet() -> None:
    traffic = Traffic(3)
    traffic.worker.num_nodes += 1
    with pytest.raises(InvariantBroken, match="I11"):
        run_audit(traffic, lambda: None)


def test_it_says_what_it_looked_at() -> None:
    traffic = Traffic(5)
    traffic.world.fill(1, tokens(3 * BLOCK))
    traffic.world.granted(2, tokens(2 * BLOCK, 600))
    looked = run_audit(traffic, lambda: None)
    assert (looked.blocks, looked.nodes, looked.leases) == (48, 1, 1)
    assert W in looked.stage


def test_a_worker_and_a_session_that_end_meanwhile_are_left_out() -> None:
    traffic = Traffic(6)
    traffic.world.granted(2, tokens(2 * BLOCK, 600))
    steps = traffic.world.core.audit(Looked())
    next(steps)
    traffic.world.core.end_client(traffic.world.session, traffic.world.now_ns)
    next(steps)
    traffic.world.core.end_worker(W, traffic.world.now_ns)
    list(steps)


def moments(between: Callable[[World], None]) -> int:
    """Audits of the same world, with `between` after the first, the second, ... step; how many raise an alarm."""
    alarms, moment, ended = 0, 0, False
    while not ended:
        traffic = Traffic(0)
        traffic.world.fill(1, tokens(6 * BLOCK))
        traffic.world.granted(2, tokens(4 * BLOCK) + tokens(1, 50), reserve=8 * BLOCK)
        steps, taken = traffic.world.core.audit(Looked()), 0
        try:
            for _ in steps:
                taken += 1
                if taken == moment:
                    between(traffic.world)
        except InvariantBroken:
            alarms += 1
        ended = taken < moment
        moment += 1
    return alarms


def cut(world: World) -> None:
    """What the lease reads is hidden, and stays cached."""
    world.core.invalidate(now_ns=world.now_ns, domain=ALICE, namespace=NAMESPACE, tokens=tokens(2 * BLOCK))


def split(world: World) -> None:
    world.granted(3, tokens(BLOCK) + tokens(9, 300))


def publish(world: World) -> None:
    world.publish(2, 4, tokens(BLOCK, 5_000))


def evict(world: World) -> None:
    world.granted(3, tokens(40 * BLOCK, 700))


@pytest.mark.parametrize("between", [cut, split, publish, evict])
def test_no_moment_is_a_bad_one(between: Callable[[World], None]) -> None:
    assert moments(between) == 0


def test_the_second_look_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "coppice_cache.core.inspection.audit_walk.TreeWalk._look_again", lambda walk, top, domain: iter(())
    )
    assert moments(cut)


def test_leaving_out_what_moved_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Marks.judge

    def careless(marks: Marks, blocks: slice, *, is_open: bool, stood_still: bool) -> None:
        marks.remember(blocks)
        judge(marks, blocks, is_open=is_open, stood_still=stood_still)

    monkeypatch.setattr(Marks, "judge", careless)
    assert moments(publish)
