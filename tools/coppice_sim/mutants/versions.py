"""What may go wrong where services of two versions share a cell; see `registry.py`."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

from msgspec.structs import replace

from coppice_cache.core.recovery import ownership
from coppice_cache.core.state.state import State
from coppice_sim.base import links
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile


def _said_to_anybody() -> Patches:
    """A message goes to a peer that has never heard of it."""
    return [(links, "may_say", lambda body, version: True)]


def _anybody_yields() -> Patches:
    """A scheduler of the version before is asked for a worker: it goes on there, and nothing is granted any more."""

    def may_move(state: State, worker: Any, owned: dict[Any, int], least: Any) -> bool:
        sessions = list(state.sessions.values())
        before = [session.may_yield for session in sessions]
        for session in sessions:
            session.may_yield = True
        found = bool(original(state, worker, owned, least))
        for session, may_yield in zip(sessions, before, strict=True):
            session.may_yield = may_yield
        return found

    original = ownership._may_move
    return [(ownership, "_may_move", may_move)]


def _listed_to_all() -> Patches:
    """A scheduler of the version before hears of others' workers as if they were its own."""

    def listed(self: State, session: Any, worker: Any, info: Any) -> Any:
        return replace(info, is_owned=worker.owner == session.epoch, yields=worker.yields)

    return [(State, "_listed", listed)]


def _back_to_an_older_session() -> Patches:
    """A worker of the version before is given to a session that is older than who plans there, and refuses it."""

    def may_move(state: State, worker: Any, owned: dict[Any, int], least: Any) -> bool:
        knows, worker.knows_owners = worker.knows_owners, True
        found = bool(original(state, worker, owned, least))
        worker.knows_owners = knows
        return found

    original = ownership._may_move
    return [(ownership, "_may_move", may_move)]


_SLOWLY = replaced(FaultProfile.rolling(), crashes=0.0, upgrades=0.6)
# A worker refuses who does not own it, and what waits there in vain ends in time: whole runs do not notice these.
VERSIONS_MASKED = (
    Mutant("listed to all", "0052: a scheduler asks for room on workers that take none of its plans", _listed_to_all),
    Mutant("back to an older session", "0052: a worker refuses its owner", _back_to_an_older_session),
)
VERSIONS = (
    Mutant("said to anybody", "0049: a message that the peer does not know", _said_to_anybody, FaultProfile.rolling()),
    Mutant("anybody yields", "O4: a worker that nobody plans for", _anybody_yields, _SLOWLY),
)
