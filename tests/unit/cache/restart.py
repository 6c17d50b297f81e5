"""A cache of epoch 2 that finds a worker of before, and what schedulers claim there."""

from __future__ import annotations

from struct import pack

from msgspec.structs import replace

from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, LeaseId, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import (
    LeaseClaim,
    Reattach,
    Reattached,
)
from coppice.messages.registration import Fence, Register
from coppice_cache.core.base.settings import DomainConfig
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings

OLD_WORKER = (1 << 32) | 1
S1, S2 = SchedulerEpoch((1 << 32) | 1), SchedulerEpoch((1 << 32) | 2)
BOB = DomainId("bob")
SEAL = b"s" * 16
BLOCKS = 8


def generation(counter: int, epoch: int = 1) -> int:
    return make_generation(CacheEpoch(epoch), counter)


def handle(block: int, counter: int, epoch: int = 1) -> bytes:
    return pack_handle(BlockId(block), make_generation(CacheEpoch(epoch), counter)).to_bytes(8, "little")


class Pool:
    """What the worker's blocks really are."""

    def __init__(self) -> None:
        self.generations = [generation(5)] * BLOCKS
        self.seals = [bytes(16)] * BLOCKS

    def seal(self, block: int) -> Pool:
        self.seals[block] = SEAL
        return self

    def arrays(self) -> dict[str, bytes]:
        return {"generations": pack(f"<{BLOCKS}Q", *self.generations), "seals": b"".join(self.seals)}

    def report(self, *schedulers: int, **changes: int) -> Register:
        values: dict[str, int] = {"epoch": OLD_WORKER, "highest": 1} | changes
        return registration(num_blocks=BLOCKS, schedulers=schedulers, **values, **self.arrays())  # type: ignore[arg-type]


def claim(number: int, *, shared: bytes = b"", owned: bytes = b"", seal: bytes = SEAL, **changes: object) -> LeaseClaim:
    made = LeaseClaim(
        lease_id=lease_id(number),
        domain=ALICE,
        namespace=NAMESPACE,
        worker_id=W,
        worker_epoch=WorkerEpoch(OLD_WORKER),
        shared=shared,
        shared_seals=seal * (len(shared) // 8),
        owned=owned,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class Restarted(World):
    """A core of epoch 2 and a worker of before."""

    def __init__(
        self,
        pool: Pool,
        *schedulers: int,
        attach: tuple[int, ...] = (),
        domains: tuple[DomainConfig, ...] = (),
        **changes: object,
    ) -> None:
        super().__init__(settings(*domains, **changes), epoch=2)
        self.pool = pool
        self.register(pool.report(*schedulers))
        for epoch in attach:
            assert self.attach(epoch) == epoch
            self.session = self.session or SchedulerEpoch(epoch)

    def claims(self, epoch: SchedulerEpoch, *claims: LeaseClaim) -> tuple[set[bytes], set[bytes]]:
        """Verdicts that this message brought: ids accepted and refused."""
        before = len(self.told(epoch))
        self.core.receive_client(epoch, Reattach(claims), self.now_ns)
        self.collect()
        said = [m for m in self.told(epoch)[before:] if isinstance(m, Reattached)]
        return {i for m in said for i in m.accepted}, {i for m in said for i in m.refused}

    def open(self) -> Fence:
        fence = self.fences()[-1]
        assert fence.report
        self.ack(fence, **self.pool.arrays())
        return fence

    @property
    def is_open(self) -> bool:
        return self.core.stats().workers[0].open


def ids(*numbers: int) -> set[LeaseId]:
    return {lease_id(number) for number in numbers}
