"""What planners say of their tenants, kept by session and carried to the other planners.

    Served of a session --> its sums --> ServedElsewhere to each other planner
    a session begins    --> Planners to all, and to it what the others said so far
    a session ends      --> Planners to all: they forget what it had at work, what it served stays served

Nothing is added up here: sums of a session grow, so whoever hears them tells by itself what is new to it, after a
restart of this service as well. A planner that is alone is told nothing, and says nothing.
"""

from __future__ import annotations

from coppice.messages.cell import SUM_MAX, TENANTS_TOLD_MAX, Planners, Served, ServedElsewhere, TenantSums
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import State


def take_served(state: State, session: Session, message: Served) -> None:
    """Raises MessageRefused when there is more of it than a session may say; nothing changed then."""
    said = {sums.tenant: sums for sums in message.tenants}
    for sums in said.values():
        _check(state, sums)
    before = {} if message.is_whole or session.served is None else session.served
    if len(before.keys() | said.keys()) > TENANTS_TOLD_MAX:
        raise MessageRefused(f"a session told the sums of more than {TENANTS_TOLD_MAX} tenants")
    before.update(said)
    session.served = before
    told = ServedElsewhere(state.cache_epoch, session.epoch, tuple(said.values()), message.is_whole)
    for other in state.sessions.values():
        if other.plans and other is not session:
            state.tell_client(other.epoch, told)


def tell_planners(state: State) -> None:
    """Sessions came, went or attached again: each planner hears who else there is, and what those said."""
    planning = [session for session in state.sessions.values() if session.plans]
    for session in planning:
        others = [other for other in planning if other is not session]
        epochs = tuple(other.epoch for other in others)
        if epochs == session.planners_told:
            continue
        state.tell_client(session.epoch, Planners(state.cache_epoch, epochs))
        known = set(session.planners_told)
        for other in others:
            if other.epoch not in known and other.served is not None:
                tenants = tuple(other.served.values())
                state.tell_client(session.epoch, ServedElsewhere(state.cache_epoch, other.epoch, tenants, True))
        session.planners_told = epochs


def _check(state: State, sums: TenantSums) -> None:
    longest = state.settings.name_bytes_max
    if len(sums.tenant) > longest:
        raise MessageRefused(f"the name of a tenant has {len(sums.tenant)} characters; at most {longest}")
    most = max(sums.num_prefill_tokens, sums.num_output_tokens, sums.num_requests, sums.num_prompt_tokens)
    if most > SUM_MAX:
        raise MessageRefused(f"a sum of tenant {sums.tenant!r} is {most}; at most {SUM_MAX}")
