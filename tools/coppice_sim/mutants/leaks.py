"""What may tell one tenant of another's prompts although every token is right; see `registry` and `two_worlds`."""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec.structs import replace

from coppice.messages.index import Grant, MatchHint, MatchQuery
from coppice_cache.core.ops import hints
from coppice_cache.core.radix.tree import common_run
from coppice_cache.core.state import single_flight
from coppice_cache.core.state.single_flight import Coming, Flights
from coppice_cache.core.state.state import State
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy import admission
from coppice_scheduler.core.queue.slot_shares import SlotShares
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_sim.mutants import forks
from coppice_sim.mutants.registry import Mutant

Patches = list[tuple[Any, str, Any]]


def hints_across() -> Patches:
    """Places in line count what any domain has cached."""

    def match(state: State, query: MatchQuery) -> MatchHint:
        domains = dict.fromkeys(domain for worker in state.workers.values() for domain, _ in worker.trees)
        found = [original(state, replace(query, domain=domain)) for domain in domains]
        return max(found, key=lambda hint: max(hint.num_cached_tokens, default=0), default=original(state, query))

    original = hints._match
    return [(hints, "_match", match)]


def flights_across() -> Patches:
    """Who asks waits for whoever computes its prefix, in any domain."""

    def coming(self: Flights, position: Any, tokens: bytes, stop: int) -> Coming | None:
        start = position.num_blocks * self._block_bytes
        for flight in self._by_lease.values():
            further = common_run(tokens, start, stop, flight.tokens[start:], self._block_bytes, least=1)
            if start < stop and flight.tokens.startswith(tokens[: start + self._block_bytes]):
                return Coming(flight, position.num_blocks + further)
        return None

    return [(single_flight.Flights, "coming", coming)]


def usage_across() -> Patches:
    """`cached_tokens` counts a prompt that another tenant is computing."""

    def start(self: Lifecycle, request: RequestState, lease: Any, grant: Grant, now_ns: int) -> None:
        original(self, request, lease, grant, now_ns)
        others = (one.request for one in self.requests.values() if one.tenant_number != request.tenant_number)
        request.num_cached_tokens += any(one.tokens[:16] == request.request.tokens[:16] for one in others)

    original = Lifecycle.start
    return [(Lifecycle, "start", start)]


# -- what a strict tenant could notice of others


def slots_for_all() -> Patches:
    """Whoever comes first has them."""

    def init(self: SlotShares, settings: SchedulerSettings) -> None:
        original(self, dataclasses.replace(settings, tenants={}))

    original = SlotShares.__init__
    return [(SlotShares, "__init__", init)]


def retry_after_by_load() -> Patches:
    """A strict tenant hears an estimate, as others do."""

    def retry_after_ms(life: Lifecycle, tenant: str, num_tokens: int) -> int:
        wait_ms = admission.estimated_wait_ms(life, tenant, num_tokens)
        return max(wait_ms, admission.RETRY_AFTER_MS_MIN)

    return [(admission, "_retry_after_ms", retry_after_ms)]


CONTENT = (
    Mutant("hints across", "I3: places in line", hints_across),
    Mutant("flights across", "I3: waits for another's prefill", flights_across),
    Mutant("usage across", "I3: cached tokens", usage_across),
    Mutant("forks across", "I3: waits for another's prompt", forks.fork_of_another_domain),
)
PRESENCE = (
    Mutant("slots for all", "non-interference: running slots", slots_for_all),
    Mutant("Retry-After by load", "non-interference: Retry-After", retry_after_by_load),
)
