"""Time: expiry, heartbeats, and what to do after a pause of our own.

Deadlines are judged on the caller's monotonic clock. When two ticks lie much further apart than a heartbeat, it was us
who slept, so everybody's deadline moves by the gap before anyone is expired.
"""

from __future__ import annotations

from coppice.ids import SchedulerEpoch
from coppice_cache.core.ops import reclaim
from coppice_cache.core.ops.offload import tick_demotions
from coppice_cache.core.ops.pins import drop_dead_pins
from coppice_cache.core.recovery.lifetimes import end_session, end_worker
from coppice_cache.core.recovery.reattach import close_windows, give_up_ns, refuse_held_claims
from coppice_cache.core.state.state import NS_PER_MS, State

_PAUSE_HEARTBEATS = 3

TAKE_AFTER_MS = 2_000  # of silence: twice as long as a session is silent that has nothing to say


class Clock:
    """Remembers when it last ticked."""

    def __init__(self, now_ns: int) -> None:
        self._ticked_ns = now_ns
        self._beat_ns = now_ns

    def tick(self, state: State, now_ns: int) -> None:
        heartbeat_ns = state.settings.heartbeat_ms * NS_PER_MS
        gap_ns = now_ns - self._ticked_ns
        self._ticked_ns = max(self._ticked_ns, now_ns)
        if gap_ns > _PAUSE_HEARTBEATS * heartbeat_ns:
            _extend_deadlines(state, gap_ns, now_ns)
        _expire(state, now_ns)
        close_windows(state, now_ns)
        if now_ns - self._beat_ns >= heartbeat_ns:
            self._beat_ns = now_ns
            for epoch, session in state.sessions.items():
                state.tell_client(epoch, session.lease_digest)
        for worker in state.workers.values():
            if late := worker.flights.tick(now_ns):
                for tier in worker.lower_tiers:
                    tier.note_late(late)
            reclaim.tick(state, worker, now_ns)
            drop_dead_pins(worker)
            tick_demotions(state, worker)
            for store in reversed(worker.stores):
                store.sweep(state.settings.nodes_dismantled_per_tick)
        state.dismantling += state.aside.expire(now_ns)
        _dismantle(state)


def _extend_deadlines(state: State, gap_ns: int, now_ns: int) -> None:
    for session in state.sessions.values():
        session.last_heard_ns = min(now_ns, session.last_heard_ns + gap_ns)
    for worker in state.workers.values():
        worker.last_heard_ns = min(now_ns, worker.last_heard_ns + gap_ns)
        worker.window.deadline_ns += gap_ns
        worker.reservations.delay(gap_ns)
    state.reattach_deadline_ns += gap_ns


def _silent_owners(state: State, now_ns: int) -> list[SchedulerEpoch]:
    """Sessions that own workers and say nothing, where another scheduler stands by without any: it can serve."""
    owners = {worker.owner for worker in state.workers.values()}
    stands_by = any(session.plans and session.epoch not in owners for session in state.sessions.values())
    if not stands_by:
        return []
    patience_ns = min(TAKE_AFTER_MS, state.settings.session_ttl_ms) * NS_PER_MS
    alive = sorted(owners & state.sessions.keys())
    return [epoch for epoch in alive if now_ns - state.sessions[epoch].last_heard_ns >= patience_ns]


def _expire(state: State, now_ns: int) -> None:
    """At most `expiries_per_tick` of each kind; the rest wait for the next tick."""
    session_ttl_ns = state.settings.session_ttl_ms * NS_PER_MS
    worker_ttl_ns = state.settings.worker_ttl_ms * NS_PER_MS
    silent = [epoch for epoch, s in state.sessions.items() if now_ns - s.last_heard_ns >= session_ttl_ns]
    for epoch in (silent or _silent_owners(state, now_ns))[: state.settings.expiries_per_tick]:
        end_session(state, epoch)
    lost = [worker_id for worker_id, w in state.workers.items() if now_ns - w.last_heard_ns >= worker_ttl_ns]
    for worker_id in lost[: state.settings.expiries_per_tick]:
        end_worker(state, worker_id)
    _give_up_claims(state, now_ns)


def _give_up_claims(state: State, now_ns: int) -> None:
    """Claims whose worker never came are refused once the window and a worker's time to live are over."""
    if now_ns < give_up_ns(state):
        return
    if state.held_claims:
        refuse_held_claims(state)
    for worker_id in state.replay.worker_ids:
        if worker_id not in state.workers:
            if (found := state.replay.take_disk(worker_id)) is not None:
                state.set_aside(worker_id, (found[0],), found[1])
            state.drop_replay(worker_id)


def _dismantle(state: State) -> None:
    """Cut the links of dead trees in slices, so that they are freed without the cyclic collector."""
    for _ in range(min(len(state.dismantling), state.settings.nodes_dismantled_per_tick)):
        node = state.dismantling.pop()
        state.dismantling.extend(node.children.values())
        node.cut_loose()
