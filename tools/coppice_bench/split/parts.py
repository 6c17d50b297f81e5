"""What both contenders of `coppice bench split` are made of: the same settings, the same executors."""

from __future__ import annotations

import os
from pathlib import Path

from coppice.ids import Namespace, WorkerId
from coppice.namespaces import encode_namespace
from coppice_bench.split.load import DOMAIN
from coppice_bench.split.sleeper import SleepingExecutor
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings, TenantLimits
from coppice_worker.core.batch.step_batch import Executor, PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings

BLOCK_SIZE = 16
NUM_BLOCKS = 32_768
MAX_CONTEXT = 1 << 15
MAX_SEQUENCES = 128
_REQUESTS_MAX = 1 << 16


def scheduler_settings(max_context: int, max_steps_in_flight: int) -> SchedulerSettings:
    """As the service's defaults, but for limits that are not to be met here."""
    return SchedulerSettings(
        instance=os.urandom(INSTANCE_BYTES),
        max_chunk_tokens=1024,
        max_running=MAX_SEQUENCES,
        max_context=max_context,
        max_steps_in_flight=max_steps_in_flight,
        default_limits=TenantLimits(max_concurrency=_REQUESTS_MAX, max_queued=_REQUESTS_MAX),
    )


def index_settings() -> CoreSettings:
    return CoreSettings(seal_key=os.urandom(32), default_domain=DomainConfig(DOMAIN))


def sleeping_worker(address: str) -> tuple[SleepingExecutor, WorkerCoreSettings]:
    executor = SleepingExecutor(PoolSpec(NUM_BLOCKS, BLOCK_SIZE), 0)
    settings = WorkerCoreSettings(
        worker_id=WorkerId("bench"),
        address=address,
        pool=executor.pool,
        namespace=Namespace(b"sleep"),
        model="sleep",
        max_sequences=MAX_SEQUENCES,
        max_context=MAX_CONTEXT,
    )
    return executor, settings


def torch_worker(checkpoint: Path) -> tuple[Executor, WorkerCoreSettings]:
    """The executor of the real worker, in this process, with one thread."""
    from coppice_worker.model.executor import TorchExecutor

    executor = TorchExecutor(checkpoint, num_blocks=4_096, block_size=BLOCK_SIZE, num_threads=1)
    settings = WorkerCoreSettings(
        worker_id=WorkerId("bench"),
        address="here",
        pool=executor.pool,
        namespace=encode_namespace(executor.namespace),
        model="bench",
        max_sequences=MAX_SEQUENCES,
        max_context=executor.info.max_context,
    )
    return executor, settings
