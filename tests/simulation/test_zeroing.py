"""From the tenants file to the device: blocks that change their domain are zeroed where a tenant asks for it (I15)."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from coppice.ids import DomainId, Namespace, WorkerId
from coppice.messages.step import SamplingParams
from coppice.tenants.directory import TenantDirectory
from coppice_cache.edge.settings import CacheSettings, core_settings
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_scheduler.core.state.request import Finish, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import Int32, PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings

POOL = PoolSpec(4, 4)
ALL = {0, 1, 2, 3}
DIGESTS = ("0" * 64, "1" * 64)
TENANTS = """
tenants:
  - {{id: a, api_key_sha256: "{}"}}
  - {{id: b, api_key_sha256: "{}", {}}}
"""


class Device(KvHonest):
    """Remembers which blocks were zeroed since the last request."""

    def __init__(self) -> None:
        super().__init__(POOL)
        self.zeroed: set[int] = set()

    def zero_blocks(self, block_ids: Int32) -> None:
        super().zero_blocks(block_ids)
        self.zeroed |= set(block_ids.tolist())


class Stack:
    """Three cores, under the tenants file of a deployment; each request takes the whole pool."""

    def __init__(self, tenants: Path) -> None:
        self._device = Device()
        worker = WorkerCoreSettings(WorkerId("w"), "here", POOL, Namespace(b"n"), "m", max_sequences=4, max_context=16)
        scheduler = SchedulerSettings(instance=b"instance", max_context=16)
        index = core_settings(CacheSettings(tenants=str(tenants)), TenantDirectory.load(tenants))
        clock = count(1, 1_000_000)
        self._engine = LocalEngine(self._device, EngineSettings(index, scheduler, worker), lambda: next(clock))
        self._numbers = count(1)

    def zeroed_for(self, name: str) -> set[int]:
        """Blocks that are zeroed for one request of this domain."""
        number, domain = next(self._numbers), DomainId(name)
        prompt = np.arange(100 * number, 100 * number + 13, dtype="<u4").tobytes()
        self._device.zeroed.clear()
        request = Request(str(number), domain, domain, prompt, SamplingParams(), 2, number=number, streams=False)
        assert self._engine.submit(request) is None
        finish: Finish | None = None
        for _ in range(200):
            for output in self._engine.advance().outputs:
                finish = output.finish or finish
            if not self._engine.step() and self._engine.is_idle:
                break
        assert finish is Finish.LENGTH
        self._engine.check()
        return set(self._device.zeroed)


def stack_with(tmp_path: Path, of_b: str) -> Stack:
    file = tmp_path / "tenants.yaml"
    file.write_text(TENANTS.format(*DIGESTS, of_b))
    return Stack(file)


@pytest.mark.parametrize("of_b", ["zero_on_change: true", "mode: disabled", "mode: {shared: g}, zero_on_change: true"])
def test_what_comes_from_or_goes_to_a_domain_that_asks_for_it_is_zeroed(tmp_path: Path, of_b: str) -> None:
    stack = stack_with(tmp_path, of_b)
    b = "group/g" if "shared" in of_b else "tenant/b"
    stack.zeroed_for("tenant/a")
    assert [stack.zeroed_for(domain) for domain in (b, "tenant/a")] == [ALL, ALL]


def test_others_reuse_blocks_as_they_are(tmp_path: Path) -> None:
    stack = stack_with(tmp_path, "mode: private")
    stack.zeroed_for("tenant/a")
    assert [stack.zeroed_for(domain) for domain in ("tenant/b", "tenant/a")] == [set(), set()]
