"""A small world around the core: a clock, workers that answer fences, and effects sorted by receiver."""

from __future__ import annotations

from struct import pack

from coppice.ids import (
    CacheEpoch,
    DomainId,
    LeaseId,
    Namespace,
    SchedulerEpoch,
    WorkerEpoch,
    WorkerId,
)
from coppice.messages.index import (
    Acquire,
    Answer,
    Candidate,
    Extend,
    Grant,
    NoCapacity,
    NoCapacityReason,
    Publish,
    Release,
)
from coppice.messages.registration import Fence, FenceAck, Register, Registered
from coppice.messages.reuse import Reuse
from coppice.session.vouchers import Vouchers
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from tests.unit.cache.block_meter import BlockMeter

KEY = b"k" * 16
MS = 1_000_000
ALICE = DomainId("alice")
NAMESPACE = Namespace(b"model-a")
W = WorkerId("w")
V = WorkerId("v")


def settings(*domains: DomainConfig, **changes: object) -> CoreSettings:
    values: dict[str, object] = {"seal_key": KEY, "default_domain": DomainConfig(DomainId("any"))} | changes
    return CoreSettings(domains=domains, **values)  # type: ignore[arg-type]


def tokens(count: int, start: int = 0) -> bytes:
    return pack(f"<{count}I", *range(start, start + count))


def lease_id(number: int) -> LeaseId:
    return LeaseId(number.to_bytes(16, "big"))


def registration(
    worker_id: WorkerId = W,
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    epoch: int = 0,
    highest: int = 0,
    generations: bytes = b"",
    seals: bytes = b"",
    schedulers: tuple[int, ...] = (),
    incarnation: int = 0,
    seal_key: bytes = KEY,
) -> Register:
    """With a voucher for its epochs, of the incarnation that a World has unless another one is named."""
    epochs = WorkerEpoch(epoch), CacheEpoch(highest)
    return Register(
        worker_id=worker_id,
        worker_epoch=WorkerEpoch(epoch),
        address=f"{worker_id}:1",
        num_blocks=num_blocks,
        block_size=block_size,
        namespace=NAMESPACE,
        model="model-a",
        highest_cache_epoch=CacheEpoch(highest),
        generations=generations or bytes(8 * num_blocks),
        seals=seals or bytes(16 * num_blocks),
        scheduler_epochs=tuple(SchedulerEpoch(e) for e in schedulers),
        voucher=Vouchers(seal_key).of_registration(incarnation, worker_id, *epochs) if epoch else b"",
        knows_owners=True,
    )


class World:
    """One core, one session by default, and a log of what it said."""

    def __init__(self, config: CoreSettings | None = None, *, epoch: int = 1, **pool: int) -> None:
        self.now_ns = 1_000 * MS
        self.core = IndexCore(config or settings(), CacheEpoch(epoch), self.now_ns)
        self.meter = BlockMeter(self.core)
        self.log: list[Effect] = []
        self.session = SchedulerEpoch(0)
        if pool:
            self.register(registration(**pool))  # type: ignore[arg-type]
            self.session = self.attach()

    def collect(self) -> list[Effect]:
        effects = self.core.take_effects()
        self.log += effects
        self.core.check()
        if not self.meter.is_of(self.core):
            self.meter = BlockMeter(self.core)
        self.meter.compare()
        return effects

    def attach(self, claimed: int = 0, *, may_yield: bool = True) -> SchedulerEpoch:
        epoch = self.core.attach_client(SchedulerEpoch(claimed), self.now_ns, may_yield=may_yield)
        self.collect()
        return epoch

    def register(self, message: Register) -> Registered:
        """Register and return the answer; fails when there is none."""
        self.core.receive_worker(message.worker_id, message, self.now_ns)
        return next(
            e.message for e in self.collect() if isinstance(e, ToWorkerEffect) and isinstance(e.message, Registered)
        )

    def fences(self, worker_id: WorkerId = W) -> list[Fence]:
        return [
            e.message
            for e in self.log
            if isinstance(e, ToWorkerEffect) and e.worker_id == worker_id and isinstance(e.message, Fence)
        ]

    def told(self, epoch: SchedulerEpoch) -> list[object]:
        return [e.message for e in self.log if isinstance(e, ToClientEffect) and e.epoch == epoch]

    def ack(self, fence: Fence, worker_id: WorkerId = W, **arrays: bytes) -> None:
        message = FenceAck(fence.fence_id, fence.worker_epoch, **arrays)
        self.core.receive_worker(worker_id, message, self.now_ns)
        self.collect()

    def tick(self, ms: int = 0, *, alive: tuple[SchedulerEpoch, ...] = (), workers: bool = True) -> None:
        """Let time pass in heartbeats; the sessions in `alive`, and the workers, are heard at each."""
        end = self.now_ns + ms * MS
        while True:
            self.now_ns = min(end, self.now_ns + 1_000 * MS)
            for epoch in alive:
                self.core.heard_client(epoch, self.now_ns)
            for worker_id in self.core.state.workers if workers else ():
                self.core.heard_worker(worker_id, self.now_ns)
            self.core.tick(self.now_ns)
            self.collect()
            if self.now_ns >= end:
                return

    # ops

    def do(self, op: object, session: SchedulerEpoch | None = None) -> Answer:
        self.now_ns += MS
        answer = self.core.execute(session or self.session, op, self.now_ns)  # type: ignore[arg-type]
        self.collect()
        return answer

    def acquire(
        self,
        number: int,
        data: bytes,
        *,
        reserve: int = 0,
        domain: DomainId = ALICE,
        namespace: Namespace = NAMESPACE,
        candidates: tuple[tuple[str, int], ...] = (("w", 0),),
        session: SchedulerEpoch | None = None,
        reuse: Reuse = Reuse.UNKNOWN,
        call_kind: int = 0,
    ) -> Answer:
        offered = tuple(Candidate(WorkerId(name), cost) for name, cost in candidates)
        reserve = reserve or len(data) // 4
        lease = lease_id(number)
        op = Acquire(lease, domain, namespace, data, reserve, offered, reuse=reuse, call_kind=call_kind)
        return self.do(op, session)

    def granted(self, number: int, data: bytes, **options: object) -> Grant:
        answer = self.acquire(number, data, **options)  # type: ignore[arg-type]
        assert isinstance(answer, Grant), answer
        return answer

    def extend(self, number: int, reserve: int) -> Answer:
        return self.do(Extend(lease_id(number), reserve))

    def publish(self, number: int, first: int, data: bytes) -> Answer:
        return self.do(Publish(lease_id(number), first, data))

    def release(self, number: int) -> Answer:
        return self.do(Release(lease_id(number)))

    def fill(self, number: int, data: bytes, **options: object) -> None:
        """Acquire, publish every whole block, release: the tokens are cached afterwards."""
        grant = self.granted(number, data, **options)
        worker = self.core.state.workers[grant.worker_id]
        whole = len(data) // worker.block_bytes * worker.block_bytes
        if whole:
            self.publish(number, 0, data[:whole])
        self.release(number)


def epoch_of_core(core: IndexCore, counter: int) -> int:
    """The epoch that the core mints as its `counter`th, of sessions or of workers."""
    return (core.cache_epoch << 32) | counter


def same_pool(world: World, *, highest: int = 1, epoch: int | None = None) -> Register:
    """What an honest worker reports that has seen every grant."""
    worker = world.core.state.workers[W]
    return registration(
        num_blocks=worker.num_blocks,
        epoch=worker.epoch if epoch is None else epoch,
        highest=highest,
        generations=worker.ledger.generation.tobytes(),
        seals=bytes(worker.ledger.seals),
    )


def cached(world: World, data: bytes, domain: DomainId = ALICE) -> int:
    """Blocks of `data` that are found; a token is added so that the last block counts."""
    return world.core.match(domain, NAMESPACE, data + tokens(1, 7), W).num_blocks


def reason(answer: Answer) -> NoCapacityReason:
    """Why there was no room."""
    assert isinstance(answer, NoCapacity), answer
    assert answer.retry_after_ms > 0
    return answer.reason
