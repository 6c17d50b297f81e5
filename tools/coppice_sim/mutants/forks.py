"""What may go wrong where one request goes on with what another has computed; see `registry.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coppice.messages.index import Grant
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state import forks
from coppice_scheduler.core.state.leases import Lease
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core import sources

Patches = list[tuple[Any, str, Any]]


def source_released_early() -> Patches:
    def close(self: Lifecycle, sequence: Any) -> None:
        running = self.workers[sequence.lease.worker_id].running.values()
        is_source = any(other.source is sequence for other in running)
        original(self, sequence)
        if is_source:
            self.release(sequence.lease)

    original = Lifecycle.close
    return [(Lifecycle, "close", close)]


def copy_of_what_is_gone() -> Patches:
    return [(forks, "_still_holds", lambda worker, source: True)]


def fork_of_another_domain() -> Patches:
    def join(request: Any, relative: Any) -> bool:
        if relative is None:
            return False
        own = request.request
        request.request = replace(own, domain=relative.request.domain)
        waits = original(request, relative)
        request.request = own
        return waits

    original = forks.join
    return [(forks, "join", join)]


def sources_not_compared() -> Patches:
    return [(sources, "has_its_prefix", lambda table, slot, fork: True)]


def copy_of_another_domain() -> Patches:
    return [*fork_of_another_domain(), *sources_not_compared()]


def copy_omitted() -> Patches:
    return [(KvHonest, "copy_blocks", lambda self, src, dst: None)]


def more_copied_than_agrees() -> Patches:
    def start(self: Lifecycle, request: Any, lease: Lease, grant: Grant, now_ns: int) -> None:
        if grant.copy_source:
            grant = replace(grant, num_copy_tokens=min(grant.num_copy_tokens + 1, lease.block_size))
        original(self, request, lease, grant, now_ns)

    original = Lifecycle.start
    return [(Lifecycle, "start", start)]


def copy_after_the_rows() -> Patches:
    late: list[Any] = []

    def copy_blocks(self: KvHonest, src: Any, dst: Any) -> None:
        late.append((src, dst))

    def execute(self: KvHonest, batch: Any) -> Any:
        output = original(self, batch)
        while late:
            copy(self, *late.pop(0))
        return output

    original, copy = KvHonest.execute, KvHonest.copy_blocks
    return [(KvHonest, "copy_blocks", copy_blocks), (KvHonest, "execute", execute)]
