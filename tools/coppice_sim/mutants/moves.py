"""What may go wrong where a request goes on after its worker; see `registry.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coppice_cache.core import index
from coppice_cache.core.recovery import lifetimes
from coppice_scheduler.core import engine
from coppice_scheduler.core.kv_client import attachment
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy import admission
from coppice_scheduler.core.state import sequences
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile


def _tokens_drawn_twice() -> Patches:
    """It starts over from its prompt, and sends what comes."""

    def retry(self: Lifecycle, request: Any, error: Any, now_ns: int) -> None:
        original(self, request, error, now_ns)
        if request.sequence is None:
            request.output.clear()
            request.sent_before = request.num_prompt_tokens

    original = Lifecycle.retry
    return [(Lifecycle, "retry", retry)]


def _gone_means_dead() -> Patches:
    """What nobody listens for has ended: its blocks need no fence."""

    def worker_gone(life: Lifecycle, worker: Any, now_ns: int) -> None:
        if worker.attached and not worker.connected:
            attachment._epoch_over(life, worker, now_ns)

    return [(engine, "worker_gone", worker_gone)]


def _sent_counts_as_prompt() -> Patches:
    """Another planner is asked to continue all that there is, as if the client had sent it."""

    def state_of(request: Any, order: Any, max_context: int) -> Any:
        if request.resumed is not None:
            whole = request.tokens + request.resumed.sent
            request = replace(request, tokens=whole, resumed=replace(request.resumed, sent=b""))
        return original(request, order, max_context)

    original = sequences.state_of
    return [(engine, "state_of", state_of)]


def _sent_again() -> Patches:
    """What the front door has leaves once more."""

    def state_of(request: Any, order: Any, max_context: int) -> Any:
        state = original(request, order, max_context)
        state.sent_before = state.num_prompt_tokens
        return state

    original = sequences.state_of
    return [(engine, "state_of", state_of)]


def _cached_counts_again() -> Patches:
    """A prompt that the planner before had computed counts as cached."""

    def state_of(request: Any, order: Any, max_context: int) -> Any:
        state = original(request, order, max_context)
        state.num_grants = 0
        return state

    original = sequences.state_of
    return [(engine, "state_of", state_of)]


def _moved_and_refused() -> Patches:
    """Who was taken once waits for room like everybody else, and is told that there is none."""

    def refusal(life: Any, room: Any, request: Any, now_ns: int) -> Any:
        return original(life, room, replace(request, resumed=None), now_ns)

    original = admission.refusal
    return [(engine, "refusal", refusal)]


def _successor_without_fence() -> Patches:
    """The session of a scheduler that is gone ends, and its blocks are free at once."""

    def succeed(state: Any, successor: Any, message: Any) -> None:
        session = state.sessions.get(message.session.epoch)
        leases = [] if session is None else [(session.workers[i], lease) for i, lease in session.leases.items()]
        original(state, successor, message)
        for worker, lease in leases:
            if lease.number in worker.leases:
                lifetimes.finish_fenced(state, worker, [lease])
                for pending in worker.fences.values():
                    pending.leases = [other for other in pending.leases if other is not lease]

    original = lifetimes.succeed
    return [(index, "succeed", succeed)]


_DEATHS = FaultProfile.restarts()
MOVES = (
    Mutant("tokens drawn twice", "I16: what was sent is sent again", _tokens_drawn_twice, FaultProfile.restarts()),
    Mutant("gone means dead", "I9: it computes on behind a partition", _gone_means_dead, FaultProfile.absences()),
    Mutant("sent counts as prompt", "O3: usage, penalties and lengths", _sent_counts_as_prompt, _DEATHS),
    Mutant("sent again", "I16: what was sent is sent again", _sent_again, _DEATHS),
    Mutant("cached counts again", "O3: usage differs by who served it", _cached_counts_again, _DEATHS),
    Mutant("moved and refused", "O3: a stream ends for want of room", _moved_and_refused, _DEATHS, demands=True),
    Mutant("successor without fence", "I9: a dead scheduler's steps write on", _successor_without_fence, _DEATHS),
)
