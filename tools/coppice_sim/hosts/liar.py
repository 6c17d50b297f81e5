"""Somebody on the network who claims epochs: made-up ones, and others' true ones with what it overheard of them.

It knows every epoch, and every voucher of sessions and registrations, but no client's key; and what a worker is told
and shown, for any worker but the one that it talks to. Whatever it says, the service goes on with the epochs that it
gave out (rule 9), and no worker takes a plan of it (rule 1).
"""

from __future__ import annotations

from random import Random
from typing import Any

from coppice.handles import CACHE_EPOCH_MAX, make_generation
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Workers
from coppice.messages.registration import Register, Registered
from coppice.session.frames import Data, Hello, Welcome
from coppice.session.vouchers import scheduler_voucher
from coppice_sim.base.environment import Environment
from coppice_sim.base.names import LIAR, NAMESPACE
from coppice_sim.base.network import Connection, Endpoint, Network
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.epochs import EpochRegistry

BLOCKS = 2
STAY_MS = 40  # on a connection


class Liar(Process):
    """`rng` and the network are its own: in runs without it everything is as if it were not there."""

    def __init__(self, env: Environment, epochs: EpochRegistry, cluster: Cluster) -> None:
        rng = Random(f"lies of {env.seed}")
        super().__init__(LIAR, env.timeline, rng)
        self.process: Process = self
        self._record = env.record
        self._overheard = env.network.overheard
        self._epochs = epochs
        self._cluster = cluster
        self._network = Network(env.timeline, rng)
        self._registers: Connection | None = None

    def lie(self) -> None:
        self._record.sometimes["lied"] += 1
        self.rng.choice((self._to_clients, self._to_workers, self._to_a_worker))()

    def on_frame(self, connection: Connection, frame: Any) -> None:
        if isinstance(frame, Welcome) and connection is self._registers:
            self._registers = None
            connection.to_server(Data(frame.connection, 1, 0, self._registration()))

    def on_closed(self, connection: Connection) -> None:
        """It has said what it wanted to say."""

    def _to_clients(self) -> None:
        if self._cluster.cache.is_alive:
            self._greet(self._cluster.cache.clients, self._hello())

    def _to_workers(self) -> None:
        if self._cluster.cache.is_alive:
            self._registers = self._greet(self._cluster.cache.workers, self._hello())

    def _to_a_worker(self) -> None:
        hosts = [host for _, host in sorted(self._cluster.workers.items()) if host.is_alive]
        if hosts:
            host = self.rng.choice(hosts)
            self._greet(host.schedulers, self._hello_at(WorkerId(host.name)))

    def _greet(self, endpoint: Endpoint, hello: Hello) -> Connection | None:
        connection = self._network.connect(self, endpoint)
        if connection is not None:
            connection.to_server(hello)
            self.after(STAY_MS * MS, lambda: connection.close(self))
        return connection

    def _epoch(self) -> CacheEpoch:
        ours = max(self._epochs.given)
        return self.rng.choice((ours, CacheEpoch(ours + 1), CacheEpoch(65_534), CacheEpoch(CACHE_EPOCH_MAX)))

    def _voucher(self, heard: list[bytes]) -> bytes:
        return self.rng.choice((b"", self.rng.randbytes(16), *heard[-3:]))

    def _hello(self) -> Hello:
        """For the cache service."""
        welcomes = [heard for heard in self._overheard if isinstance(heard, Welcome)]
        claimed, lower = self._epoch(), self.rng.getrandbits(32)
        made_up = (claimed << 32 | lower, claimed << 32 | self.rng.getrandbits(32), self._voucher([]))
        true = [(welcome.incarnation, welcome.epoch, welcome.voucher) for welcome in welcomes[-4:]]
        incarnation, epoch, voucher = self.rng.choice((made_up, *true))
        return Hello(self.rng.randbytes(16), 1, incarnation, 0, epoch, LIAR, voucher=voucher)

    def _hello_at(self, worker_id: WorkerId) -> Hello:
        """For a worker: with what others were shown, or with what another worker's key makes."""
        heard = self._overheard
        shown = [w.voucher for said in heard if isinstance(said, Workers) for w in said.workers]
        others = [v for v in shown if v not in self._shown_at(worker_id)]
        epoch = SchedulerEpoch(self.rng.choice(((1 << 64) - 1, *self._planning())))
        made = scheduler_voucher(self.rng.randbytes(16), epoch)
        return Hello(self.rng.randbytes(16), 1, 0, 0, epoch, LIAR, voucher=self._voucher([made, *others]))

    def _shown_at(self, worker_id: WorkerId) -> set[bytes]:
        said = [heard for heard in self._overheard if isinstance(heard, Workers)]
        return {w.voucher for message in said for w in message.workers if w.worker_id == worker_id}

    def _planning(self) -> list[SchedulerEpoch]:
        return [host.epoch for _, host in sorted(self._cluster.schedulers.items()) if host.epoch]

    def _registration(self) -> Register:
        heard = [said for said in self._overheard if isinstance(said, Registered)]
        claimed = self._epoch()
        epochs = [(WorkerEpoch(claimed << 32 | 1), claimed), *((r.worker_epoch, r.cache_epoch) for r in heard[-3:])]
        worker_epoch, cache_epoch = self.rng.choice(epochs)
        generation = make_generation(self.rng.choice((cache_epoch, CacheEpoch(65_535))), 1 << 23)
        return Register(
            worker_id=WorkerId(LIAR),
            worker_epoch=worker_epoch,
            address=LIAR,
            num_blocks=BLOCKS,
            block_size=4,
            namespace=NAMESPACE,
            model="honest",
            highest_cache_epoch=cache_epoch,
            generations=generation.to_bytes(8, "little") * BLOCKS,
            seals=self.rng.randbytes(16) * BLOCKS,
            scheduler_epochs=(SchedulerEpoch(claimed << 32 | 1),),
            voucher=self._voucher([r.voucher for r in heard]),
            knows_owners=True,
        )
