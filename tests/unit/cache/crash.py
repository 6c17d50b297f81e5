"""A cache service that crashes, what was left behind, and the one that comes after it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coppice.handles import BLOCKS_MAX
from coppice.ids import SchedulerEpoch, WorkerEpoch
from coppice.messages.index import LeaseClaim, Reattach, Reattached
from coppice.messages.registration import Register
from coppice.seals import NO_SEAL, SEAL_BYTES, chain_seals
from coppice_cache.core.base.events import IndexEvent
from coppice_cache.core.base.settings import CoreSettings
from coppice_cache.core.pool.free_ring import unpack_handles
from coppice_cache.core.radix.tree import Node
from tests.unit.cache.world import NAMESPACE, W, World, registration, settings

Found = dict[int, bytes]  # handle -> seal


def found(world: World) -> Found:
    """All that can be found, by walking the trees; every seal is that of its tokens."""
    handles: Found = {}
    for worker in world.core.state.workers.values():
        for tree in worker.trees.values():
            waiting: list[tuple[Node, bytes]] = [(tree, NO_SEAL)] if worker.is_current(tree) else []
            while waiting:
                node, above = waiting.pop()
                seals = chain_seals(tree.chain_key, above, node.tokens, worker.block_bytes)
                packed = [seals[at : at + SEAL_BYTES] for at in range(0, len(seals), SEAL_BYTES)]
                assert seals == worker.ledger.seals_of(node.handles)
                handles.update(zip(unpack_handles(node.handles), packed, strict=True))
                waiting += [(child, seals[-SEAL_BYTES:] or above) for child in node.children.values()]
    return handles


class Restarted(World):
    """One that another may come after. What the worker has is what the ledger says, unless a test tells otherwise."""

    epoch = 1
    worker_epoch = WorkerEpoch(0)

    def all_events(self) -> list[IndexEvent]:
        """What stands in the log."""
        raise NotImplementedError

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """generations [n], seals [n, 2]"""
        ledger = self.core.state.workers[W].ledger
        return ledger.generations.copy(), ledger.seal_words.copy()

    def claims(self) -> tuple[LeaseClaim, ...]:
        made = []
        for lease in self.core.state.sessions[self.session].leases.values():
            shared = lease.handles(0, lease.num_shared)
            made.append(
                LeaseClaim(
                    lease_id=lease.lease_id,
                    domain=lease.account.config.domain,
                    namespace=NAMESPACE,
                    worker_id=W,
                    worker_epoch=self.worker_epoch,
                    shared=shared,
                    shared_seals=lease.grant.shared_seals,
                    owned=lease.handles(lease.num_shared, lease.num_blocks),
                )
            )
        return tuple(made)


class Before(Restarted):
    """Epoch 1."""

    def __init__(self, config: CoreSettings | None = None, num_blocks: int = 16) -> None:
        super().__init__(config or settings(record_events=True), num_blocks=num_blocks)
        self.events: list[IndexEvent] = []
        self.worker_epoch = self.core.state.workers[W].epoch

    def all_events(self) -> list[IndexEvent]:
        self.events += self.core.take_events()
        return self.events


class After(Restarted):
    """The next epoch: loads the log; the worker registers, and the session of before re-attaches."""

    def __init__(
        self,
        before: Restarted,
        events: list[IndexEvent] | None = None,
        *,
        config: CoreSettings | None = None,
        claims: tuple[LeaseClaim, ...] | None = None,
        arrays: tuple[np.ndarray, np.ndarray] | None = None,
        second: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.epoch = before.epoch + 1
        super().__init__(config or replace(before.core.state.settings), epoch=self.epoch)
        self.core.load_replay({W: before.all_events() if events is None else events})
        self.first = arrays or before.arrays()
        self.second = second or self.first
        self.session = before.session
        self.worker_epoch = self.register(self._report(before)).worker_epoch
        assert self.attach(before.session) == before.session
        message = Reattach(before.claims() if claims is None else claims)
        self.core.receive_client(self.session, message, self.now_ns)
        self.collect()
        self.settled: dict[bytes, int] = {}

    def all_events(self) -> list[IndexEvent]:
        events, cursor = self.core.snapshot_slice(None, 1 << 20)
        assert cursor is None
        return list(events)

    def _report(self, before: Restarted) -> Register:
        generations, seals = self.first
        return registration(
            num_blocks=len(generations),
            epoch=before.worker_epoch,
            highest=before.epoch,
            generations=generations.tobytes(),
            seals=seals.tobytes(),
            schedulers=(before.session,),
            seal_key=before.core.state.settings.seal_key,
        )

    def open(self) -> After:
        generations, seals = self.second
        self.ack(self.fences()[0], generations=generations.tobytes(), seals=seals.tobytes())
        assert self.core.stats().workers[0].open
        for message in self.told(self.session):
            if isinstance(message, Reattached) and message.settled_blocks:
                self.settled |= dict(zip(message.accepted, message.settled_blocks, strict=True))
        return self

    def check_against_the_worker(self) -> Found:
        """Nothing stale can be found; returns what can."""
        now = found(self)
        generations, seals = self.second
        for handle, seal in now.items():
            block = handle & (BLOCKS_MAX - 1)
            assert int(generations[block]) == handle >> 24, f"block {block} is found under another generation"
            assert seals[block].tobytes() == seal, f"block {block} is found with another seal"
        return now


def worker_epoch(number: int) -> WorkerEpoch:
    return WorkerEpoch((1 << 32) | number)


def scheduler_epoch(number: int) -> SchedulerEpoch:
    return SchedulerEpoch((1 << 32) | number)
