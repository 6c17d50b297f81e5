"""The domains' shares change while it runs: all or nothing.

    listed before and now     its new guarantee and maximum count for what comes; another mode forgets what is cached
    listed now                is served from now on
    listed before             acquires no more; what is cached is forgotten, and its memory comes back in slices

What runs goes on. Whoever holds more than its new maximum gets no more until it is below; a raised guarantee is met as
any is: by what may be evicted, and by asking back what others borrowed.
"""

from __future__ import annotations

from dataclasses import replace

from coppice_cache.core.base.errors import SettingsRefused
from coppice_cache.core.base.settings import DomainConfig, Domains
from coppice_cache.core.ops.invalidation import invalidate
from coppice_cache.core.ops.reclaim import end_reservations_of_worker
from coppice_cache.core.state.state import State


def set_domains(state: State, configs: tuple[DomainConfig, ...], now_ns: int) -> None:
    """Raises SettingsRefused when they contradict each other, or a worker that is here cannot keep them."""
    settings = replace(state.settings, domains=configs)
    domains = Domains(settings)
    for worker in state.workers.values():
        if misfit := domains.misfit(worker.num_blocks):
            raise SettingsRefused(f"worker {worker.worker_id!r}: {misfit}")
    before = {config.domain: config for config in state.domains.listed}
    now = {config.domain: config for config in configs}
    removed = before.keys() - now.keys()
    for domain, config in before.items():
        # What is to be zeroed from now on may lie below the device, where nothing is.
        if domain in removed or now[domain].mode is not config.mode or (now[domain].wipes and not config.wipes):
            invalidate(state, domain, None, None, now_ns)
    domains.any_wipes |= state.domains.any_wipes  # what a strict domain has left lies there still
    state.settings, state.domains = settings, domains
    for worker in state.workers.values():
        end_reservations_of_worker(state, worker)
        worker.reservations.reset()
        worker.quotas.reconfigure(configs, removed)
        worker.ledger.any_wipes = domains.any_wipes
        for tier in worker.lower_tiers:
            tier.store.quotas.reconfigure(tuple(config.by_shares() for config in configs), removed)
