"""Sizes of one run, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from coppice.ids import DomainId, WorkerId
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode, TierCosts
from coppice_sim.base.names import NAMESPACE
from coppice_worker.core.batch.step_batch import PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings

BLOCK_SIZE = 4
TTL_MS = 1_000


@dataclass(slots=True)
class WorldSettings:
    """Sizes of one run."""

    index: CoreSettings
    domains: tuple[str, ...]
    num_workers: int
    num_blocks: int
    max_schedulers: int
    max_context: int
    step_ms: float
    max_step_tokens: int
    arrival_ms: float
    num_host_blocks: int = 0
    copy_ms: float = 0.0
    num_disk_blocks: int = 0
    disk_faults: float = 0.0  # share of the copies of a disk that fail

    @staticmethod
    def random(rng: Random) -> WorldSettings:
        configs = (
            DomainConfig(DomainId("amber"), Mode.PRIVATE, maximum_share=rng.choice((1.0, 0.7))),
            DomainConfig(DomainId("birch"), Mode.PRIVATE, guarantee_share=rng.choice((0.0, 0.3, 0.5))),
            DomainConfig(DomainId("cedar"), Mode.STRICT, guarantee_share=0.4),
            DomainConfig(DomainId("dusk"), Mode.DISABLED, zero_on_change=True),
        )[: rng.choice((1, 2, 2, 3, 4))]
        return WorldSettings(
            index=CoreSettings(
                seal_key=b"key of the simulation",
                domains=configs,
                session_ttl_ms=TTL_MS,
                worker_ttl_ms=TTL_MS,
                heartbeat_ms=100,
                flight_tokens_min=rng.choice((1, 8)),
                flight_wait_ms=rng.choice((50, 500)),
                reclaim_grace_ms=rng.choice((40, 200)),
                record_events=True,
            ),
            domains=tuple(config.domain for config in configs),
            num_workers=rng.choice((1, 1, 2)),
            num_blocks=rng.choice((14, 20, 32, 60)),
            max_schedulers=2,
            max_context=48,
            step_ms=rng.choice((0.5, 2.0, 8.0)),
            max_step_tokens=rng.choice((8, 16, 64)),
            arrival_ms=rng.choice((10.0, 25.0, 60.0)),
        )

    def add_host_tier(self, rng: Random) -> None:
        """For two of three runs, with costs that make its use likely."""
        self.num_host_blocks = rng.choice((0, 12, 40))
        self.copy_ms = rng.choice((0.5, 5.0, 40.0))
        if self.num_host_blocks:
            self.index = replace(
                self.index,
                flight_tokens_min=rng.choice((1, 4, 8)),
                tiers=TierCosts(prefill_us_per_token=100.0, copy_us_per_block=1.0, order_us=10.0),
                demote_below_share=rng.choice((0.3, 0.6, 0.9)),
            )

    def add_disk_tier(self, rng: Random) -> None:
        """For two of three runs with a host tier, which is kept as free as the device is."""
        self.num_disk_blocks = rng.choice((0, 30, 80)) if self.num_host_blocks else 0
        self.disk_faults = rng.choice((0.05, 0.3, 0.5))
        if self.num_disk_blocks:
            self.index = replace(self.index, disk_costs=self.index.tiers, disk_rest_ms=rng.choice((0, 100)))

    def worker(self, name: str) -> WorkerCoreSettings:
        return WorkerCoreSettings(
            worker_id=WorkerId(name),
            address=name,
            pool=PoolSpec(self.num_blocks, BLOCK_SIZE),
            namespace=NAMESPACE,
            model="honest",
            max_sequences=32,
            max_context=self.max_context,
            max_step_tokens=self.max_step_tokens,
            num_host_blocks=self.num_host_blocks,
            num_disk_blocks=self.num_disk_blocks,
        )
