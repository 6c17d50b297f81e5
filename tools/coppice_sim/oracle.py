"""What must hold between the cores (DESIGN section 6), looked at after every event.

The cores check themselves; here stands what no core can see alone: whether what the ledger believes is what the worker
has, whether what is findable was really written, whether a block is granted while somebody uses it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.handles import block_ids
from coppice.ids import WorkerId
from coppice.seals import NO_SEAL, chain_seals
from coppice_cache.core.base.settings import CoreSettings
from coppice_cache.core.pool.ledger import BlockState
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.workers import Worker as IndexWorker
from coppice_sim.base.environment import Record
from coppice_sim.base.process import Process
from coppice_sim.hosts.cache import CacheHost
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.kv_honest import KvHonest, prefix_hashes, salt_of_domain
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.hosts.worker import WorkerHost
from coppice_worker.core.blocks.pool import BlockPool

CONTENT_EVERY = 8  # checks; comparing all findable blocks is the dearest check

Bool = npt.NDArray[np.bool_]


class Oracle:
    def __init__(self, record: Record, index: CoreSettings, cluster: Cluster) -> None:
        self._record = record
        self._index = index
        self._cluster = cluster
        self._events = 0

    def check_all(self) -> None:
        """Every core, and all content; when everything is at rest."""
        self._events = -1  # so that this one looks at content
        self.check(set(self._cluster.processes()))

    def check(self, touched: set[Process]) -> None:
        """Every touched core by itself, then each worker against the ledger."""
        for host in sorted(touched, key=lambda host: host.name):
            if host.is_alive and isinstance(host, CacheHost | SchedulerHost | WorkerHost):
                host.core.check()
        cache = self._cluster.cache
        if not cache.is_alive:
            return
        self._events += 1
        for name, host in sorted(self._cluster.workers.items()):
            if cache not in touched and host not in touched:
                continue
            ledger_side = cache.core.state.workers.get(WorkerId(name))
            if not host.is_alive or ledger_side is None or not ledger_side.is_open:
                continue
            if ledger_side.epoch == host.core.worker_epoch:
                self._check_worker(ledger_side, host)

    def _check_worker(self, index: IndexWorker, host: WorkerHost) -> None:
        self._check_pool(index, host.core.pool, host.name)
        written = np.zeros(index.num_blocks, bool)
        if host.outstanding is not None and host.outstanding.batch is not None:
            written[host.outstanding.batch.slots // index.block_size] = True
        state = index.ledger.states
        self._none(written & (state == BlockState.FREE), "I9", host.name, "free in the ledger and being written")
        self._none(written & (state == BlockState.CACHED), "I7", host.name, "findable and being written")
        below = list(zip(index.lower_tiers, self._below(host), strict=False))
        for tier, (name, pool, _) in below:
            self._check_pool(tier.store, pool, f"{host.name}'s {name}")
        if self._events % CONTENT_EVERY == 0:
            self.check_content(index, host.executor, host.name)
            for tier, (name, _, memory) in below:
                self.check_content(tier.store, memory, f"{host.name}'s {name}")
                self._check_residue(memory, f"{name} of {host.name}")

    @staticmethod
    def _below(host: WorkerHost) -> tuple[tuple[str, BlockPool, KvHonest], ...]:
        """The worker's lower tiers: name, what its core knows, content."""
        return ("host", host.core.host_pool, host.tiers.host), ("disk", host.core.disk_pool, host.tiers.disk)

    def _check_pool(self, store: BlockStore, pool: BlockPool, name: str) -> None:
        """What the ledger believes of a tier and what the worker has there."""
        state, granted = store.ledger.states, store.ledger.generations
        opened, used = pool.generation, pool.has_user()
        self._none(used & (state == BlockState.FREE), "I9", name, "free in the ledger and used on the worker")
        self._none(used & (granted != opened), "I9", name, "granted again and still used on the worker")
        self._none(opened > granted, "I4", name, "opened under a generation that was not granted")
        self._none((state == BlockState.CACHED) & (opened != granted), "I8", name, "findable and never opened")

    def check_content(self, store: BlockStore, memory: KvHonest, name: str) -> None:
        """I8, I12, I3: every findable block holds exactly the KV of its chain, in its domain's tree."""
        for tree in store.trees.values():
            salt = salt_of_domain(tree.domain)
            waiting: list[tuple[Node, bytes, bytes]] = [(child, b"", b"") for child in tree.children.values()]
            while waiting:
                node, tokens, handles = waiting.pop()
                tokens, handles = tokens + node.tokens, handles + node.handles
                waiting.extend((child, tokens, handles) for child in node.children.values())
                if not node.children:
                    self._check_chain(memory, name, salt, tokens, handles, tree.domain)
                chain = chain_seals(tree.chain_key, NO_SEAL, tokens, store.block_bytes)
                seals = store.ledger.seals_of(node.handles)
                if chain[len(chain) - len(seals) :] != seals:
                    self._record.fail("I12", f"a seal in the tree of {tree.domain} is not that of its tokens")

    def _check_residue(self, memory: KvHonest, name: str) -> None:
        """I15: nothing of a domain that must leave no trace is ever below the device, where nobody zeroes."""
        for config in self._index.domains:
            if config.wipes and (memory.salts == salt_of_domain(config.domain)).any():
                self._record.fail("I15", f"something of {config.domain} is on the {name}")

    def _check_chain(self, memory: KvHonest, name: str, salt: int, tokens: bytes, handles: bytes, domain: str) -> None:
        slots, expected = memory.slots_of(block_ids(handles)), prefix_hashes(np.frombuffer(tokens, "<u4"))
        good = (
            (memory.hashes[slots] == expected)
            & (memory.positions[slots] == np.arange(len(slots)))
            & (memory.salts[slots] == np.uint64(salt))
        )
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            block = int(slots[at]) // memory.pool.block_size
            self._record.fail("I8", f"block {block} of {name} is findable by {domain} at position {at}, but wrong")

    def _none(self, bad: Bool, rule: str, name: str, what: str) -> None:
        if bad.any():
            self._record.fail(rule, f"blocks {np.flatnonzero(bad).tolist()} of {name} are {what}")
