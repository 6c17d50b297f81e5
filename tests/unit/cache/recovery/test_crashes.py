"""The cache crashes again and again under random work; a plain worker and plain schedulers survive it.

What must hold over all incarnations: a block is granted only while nobody who may still run uses it (I9), under a
generation that it never had (I4), and every lease of a scheduler that came back lives on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from struct import pack, unpack

import pytest

from coppice.handles import block_of, generation_of
from coppice.ids import CacheEpoch, LeaseId, SchedulerEpoch
from coppice.messages.index import Abandon, Extended, Grant, LeaseClaim, Published, Reattach, Reattached, Release
from coppice.messages.registration import Fence, FenceAck, Register
from coppice_cache.core.base.results import ToClientEffect
from coppice_cache.core.index import IndexCore
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, registration, settings, tokens

BLOCKS = 16


@dataclass
class Held:
    """A lease as its scheduler knows it."""

    session: SchedulerEpoch
    shared: bytes
    shared_seals: bytes
    owned: bytes
    data: bytes
    attached: bool = False

    @property
    def blocks(self) -> set[int]:
        return {
            block_of(handle) for handle in unpack(f"<{len(self.shared + self.owned) // 8}Q", self.shared + self.owned)
        }


class Survivors:
    """One worker and its schedulers."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(settings(), epoch=1)
        self.generations = [0] * BLOCKS
        self.seals = [bytes(16)] * BLOCKS
        self.seen: set[int] = set()
        self.live: dict[LeaseId, Held] = {}
        self.running: dict[LeaseId, Held] = {}  # over for the cache, perhaps not for the worker: until a fence
        self.happened: Counter[str] = Counter()
        self.number = 0
        self.worker_epoch = self.world.register(self.report(0)).worker_epoch
        self.sessions = [self.world.attach(), self.world.attach()]

    def report(self, worker_epoch: int) -> Register:
        return registration(
            num_blocks=BLOCKS,
            epoch=worker_epoch,
            highest=self.world.core.cache_epoch - 1,
            generations=pack(f"<{BLOCKS}Q", *self.generations),
            seals=b"".join(self.seals),
            schedulers=tuple({held.session for held in [*self.live.values(), *self.running.values()]}),
        )

    def receive_grant(self, owned: bytes, *, but: LeaseId) -> None:
        used = {b for i, held in [*self.live.items(), *self.running.items()] if i != but for b in held.blocks}
        for handle in unpack(f"<{len(owned) // 8}Q", owned):
            assert block_of(handle) not in used, "granted while somebody may use it"
            assert all(handle > old for old in self.seen if block_of(old) == block_of(handle)), "an old generation"
            self.seen.add(handle)

    def attach(self, held: Held) -> None:
        """The worker runs the sequence: its owned blocks open new occupancies."""
        held.attached = True
        for handle in unpack(f"<{len(held.owned) // 8}Q", held.owned):
            if generation_of(handle) > self.generations[block_of(handle)]:
                self.generations[block_of(handle)] = generation_of(handle)
                self.seals[block_of(handle)] = bytes(16)

    # what may happen

    def acquire(self) -> None:
        self.number += 1
        data = tokens(self.random.randint(1, 24), self.random.randrange(2) * 8)
        session = self.random.choice(self.sessions)
        answer = self.world.acquire(self.number, data, session=session)
        if isinstance(answer, Grant):
            self.happened["shared"] += bool(answer.shared)
            self.receive_grant(answer.owned, but=answer.lease_id)
            self.live[answer.lease_id] = Held(session, answer.shared, answer.shared_seals, answer.owned, data)

    def pick(self) -> LeaseId | None:
        return self.random.choice(sorted(self.live)) if self.live else None

    def run(self) -> None:
        if (number := self.pick()) is not None:
            self.attach(self.live[number])

    def publish(self) -> None:
        number = self.pick()
        if number is None or not self.live[number].attached:
            return
        held, world = self.live[number], self.world
        world.session = held.session
        answer = world.publish(int.from_bytes(number, "big"), 0, held.data[: len(held.data) // 16 * 16])
        if isinstance(answer, Published):
            seals = [answer.seals[i : i + 16] for i in range(0, len(answer.seals), 16)]
            for handle, seal in zip(unpack(f"<{len(answer.handles) // 8}Q", answer.handles), seals, strict=True):
                self.seals[block_of(handle)] = seal

    def extend(self) -> None:
        if (number := self.pick()) is None:
            return
        held = self.live[number]
        self.world.session = held.session
        answer = self.world.extend(int.from_bytes(number, "big"), len(held.shared + held.owned) // 2 + 4)
        if isinstance(answer, Extended):
            self.receive_grant(answer.owned, but=number)
            held.owned += answer.owned
            held.attached = False

    def release(self) -> None:
        if (number := self.pick()) is not None:
            self.world.do(Release(number), self.live.pop(number).session)

    def abandon(self) -> None:
        if (number := self.pick()) is not None:
            self.running[number] = self.live.pop(number)
            self.world.do(Abandon(number), self.running[number].session)
            self.acknowledge()  # an abandoned lease that a crash overtakes is claimed again by its scheduler (rule 3)

    def expire(self) -> None:
        session = self.random.choice(self.sessions)
        self.sessions.remove(session)
        for number in [number for number, held in self.live.items() if held.session == session]:
            self.running[number] = self.live.pop(number)
        self.world.core.end_client(session, self.world.now_ns)
        self.world.collect()
        self.sessions.append(self.world.attach())

    def acknowledge(self) -> None:
        worker = self.world.core.state.workers[W]
        for fence in [pending.message for pending in worker.fences.values()]:
            self.obey(fence)

    def obey(self, fence: Fence) -> None:
        def is_named(number: LeaseId, held: Held) -> bool:
            below = held.session <= fence.up_to_epoch and held.session not in fence.spared
            return below or held.session in fence.scheduler_epochs or number in fence.lease_ids

        for number in [number for number, held in self.running.items() if is_named(number, held)]:
            del self.running[number]
        if fence.report:  # plans that were on their way have arrived meanwhile
            for held in self.live.values():
                if self.random.random() < 0.5:
                    self.attach(held)
        arrays = (pack(f"<{BLOCKS}Q", *self.generations), b"".join(self.seals)) if fence.report else (b"", b"")
        message = FenceAck(fence.fence_id, fence.worker_epoch, *arrays)
        self.world.core.receive_worker(W, message, self.world.now_ns)
        self.world.collect()

    def crash(self) -> None:
        world = self.world
        epoch = CacheEpoch(world.core.cache_epoch + 1)
        world.core, world.log = IndexCore(settings(), epoch, world.now_ns), []
        steps = [self.come_back] * len(self.sessions) + [self.register]
        self.random.shuffle(steps)
        coming, self.sessions = list(self.sessions), []
        for step in steps:
            step(coming)
        world.tick(11_000, alive=tuple(self.sessions))
        verdicts = [e.message for e in world.log if isinstance(e, ToClientEffect) and isinstance(e.message, Reattached)]
        refused = {number for verdict in verdicts for number in verdict.refused}
        accepted = {number for verdict in verdicts for number in verdict.accepted}
        assert accepted == {number for number, held in self.live.items() if held.session in self.sessions}
        assert not refused
        for number in [number for number in self.live if number not in accepted]:
            self.running[number] = self.live.pop(number)
        self.happened["accepted"] += len(accepted)
        self.happened["lost"] += bool(self.running)
        self.acknowledge()
        assert not self.running
        while len(self.sessions) < 2:
            self.sessions.append(world.attach())

    def come_back(self, coming: list[SchedulerEpoch]) -> None:
        session = coming.pop()
        if self.random.random() < 0.25:
            return
        attached = self.world.attach(session)
        if attached != session:
            return
        self.sessions.append(session)
        claims = [
            LeaseClaim(number, ALICE, NAMESPACE, W, self.worker_epoch, held.shared, held.shared_seals, held.owned)
            for number, held in self.live.items()
            if held.session == session
        ]
        self.random.shuffle(claims)
        self.world.core.receive_client(session, Reattach(tuple(claims)), self.world.now_ns)
        self.world.collect()

    def register(self, coming: list[SchedulerEpoch]) -> None:
        assert self.world.register(self.report(self.worker_epoch)).worker_epoch == self.worker_epoch


WEIGHTS = {
    "acquire": 8,
    "run": 6,
    "publish": 6,
    "extend": 3,
    "release": 4,
    "abandon": 0.5,
    "expire": 0.2,
    "acknowledge": 1,
    "crash": 0.5,
}


@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_safe_over_many_incarnations(seed: int) -> None:
    survivors = Survivors(seed)
    names = survivors.random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=200)
    for name in names:
        getattr(survivors, name)()
    survivors.crash()
    for situation in ("shared", "accepted"):
        assert survivors.happened[situation], survivors.happened
    for number in list(survivors.live):
        survivors.world.do(Release(number), survivors.live[number].session)
    assert survivors.world.core.stats().free_blocks == BLOCKS
