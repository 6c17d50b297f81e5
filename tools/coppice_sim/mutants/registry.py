"""The cores with one protection taken away, by name. A suite that does not notice is no suite.

`tests/simulation` runs seeds against each of them until one breaks. Where two protections cover each other (DESIGN 6a),
taking one away changes nothing that a whole run can see; those checks are asked directly in unit tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from coppice.compiled import PACKAGES, is_compiled
from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.index import Acquire, Release
from coppice.messages.registration import Fence
from coppice_cache.core import index
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.ops import grants, ops, reclaim, waits
from coppice_cache.core.pool.ledger import Ledger
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.reservations import Reservations
from coppice_cache.core.radix.tree import Node, walk
from coppice_cache.core.recovery import clock, entries, lifetimes, reattach, registration
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Phase, Worker
from coppice_scheduler.core import engine
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseTable
from coppice_sim.mutants import epochs as epoch_mutants
from coppice_sim.mutants import forks as fork_mutants
from coppice_sim.mutants import queue_room as queue_mutants
from coppice_sim.mutants import salts as salt_mutants
from coppice_sim.nemesis import FaultProfile
from coppice_worker.core.blocks.pool import BlockPool, BlockRefusal
from coppice_worker.core.worker import WorkerCore

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`patches` gives (owner, name, replacement) anew for every use; `breaks` names the rule of the design; `faults`
    are those under which it shows soon (None: any)."""

    name: str
    breaks: str
    patches: Callable[[], Patches]
    faults: FaultProfile | None = None
    tiers: bool = False  # whether workers may have a host tier; without one it shows sooner
    disks: bool = False  # and a disk tier below it
    demands: bool = False  # whether tenants have limits; without them it shows sooner

    @contextmanager
    def applied(self) -> Iterator[None]:
        assert not any(map(is_compiled, PACKAGES)), "compiled code does not see what is put in its place"
        patches = self.patches()
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


# -- the cache service


def _no_fence_wait() -> Patches:
    original = State.send_fence

    def send_fence(self: State, worker: Worker, fence: Fence, leases: list[Any]) -> None:
        original(self, worker, fence, [])
        lifetimes.finish_fenced(self, worker, leases)

    def finish(self: Worker, lease: Any) -> None:
        lease.draining = False
        for block in lease.own_blocks():
            self.ledger.undrain(block)
        finish_lease(self, lease)

    finish_lease = Worker.finish
    return [(State, "send_fence", send_fence), (Worker, "finish", finish)]


def _shared_root() -> Patches:
    def placements(state: State, op: Acquire, config: Any) -> Any:
        found = original(state, op, config)
        if config.mode is Mode.DISABLED:
            return found
        first = [placement._replace(tree=_any_tree(placement)) for placement in found]
        return [
            placement._replace(
                position=walk(placement.tree, op.tokens[: _matchable(op, placement)], placement.worker.block_bytes)
            )
            for placement in first
        ]

    def _any_tree(placement: Any) -> Any:
        return next((tree for tree in placement.worker.trees.values() if tree.children), placement.tree)

    def _matchable(op: Acquire, placement: Any) -> int:
        return waits.matchable_bytes(op.tokens, placement.worker.block_bytes)

    original = grants._placements
    return [(grants, "_placements", placements)]


def _double_release_frees_twice() -> Patches:
    finished: dict[bytes, tuple[Worker, list[int]]] = {}

    def release(session: Any, worker: Worker, lease: Any, now_ns: int, *reuse: Any) -> None:
        finished[lease.lease_id] = (worker, lease.own_blocks())
        original(session, worker, lease, now_ns, *reuse)

    def execute(state: State, session: Any, op: Any, now_ns: int) -> Any:
        if isinstance(op, Release) and op.lease_id in finished and op.lease_id not in session.leases:
            worker, blocks = finished.pop(op.lease_id)
            worker.ledger.free.extend(np.array(blocks))
        return original_execute(state, session, op, now_ns)

    original, original_execute = ops.release, ops.execute
    return [(ops, "release", release), (index, "execute", execute)]


def _no_reattach_window() -> Patches:
    def close(self: Ledger) -> None:
        """Leave every block free."""

    def new_worker(*args: Any, **named: Any) -> Any:
        worker = original(*args, **named)
        worker.phase = Phase.OPEN
        return worker

    original = registration._new_worker
    return [(Ledger, "close", close), (registration, "_new_worker", new_worker)]


def _no_drain_pins() -> Patches:
    def drain(self: Worker, lease: Any) -> None:
        original(self, lease)
        if lease.tree is not None:
            self.unpin(lease, lease.node)
            lease.tree = None
            self.quotas.refresh(lease.account)

    original = Worker.drain
    return [(Worker, "drain", drain)]


def _no_second_look() -> Patches:
    return [(reattach, "_second_look", lambda worker, ack: [])]


def _shared_claim_at_least() -> Patches:
    def fits(state: State, worker: Worker, account: Any, claim: Any) -> bool:
        return original(state, worker, account, replace(claim, shared=b"", shared_seals=b""))

    original = reattach._fits_worker
    return [(reattach, "_fits_worker", fits)]


def _fenced_sessions_come_back() -> Patches:
    def may_reattach(state: State, epoch: SchedulerEpoch, now_ns: int) -> bool:
        return state.is_old(epoch)

    return [(lifetimes, "may_reattach", may_reattach)]


def _pinned_blocks_evicted() -> Patches:
    def protects_nothing(self: Node, number: int) -> int:
        self.pins = {*self.pins, number}
        return 0

    def unpin(self: Node, number: int) -> int:
        self.pins = self.pins - {number}
        return 0

    return [(Node, "pin", protects_nothing), (Node, "unpin", unpin)]


def _no_zeroing() -> Patches:
    return [(Ledger, "_must_zero", lambda self, before, after: False)]


def _epoch_not_raised() -> Patches:
    def believed(state: State, message: Any) -> Any:
        told, is_ours = original(state, message)
        return replace(told, highest_cache_epoch=CacheEpoch(0)), is_ours

    original = registration.believed
    return [(registration, "believed", believed)]


def _no_pause_guard() -> Patches:
    return [(clock, "_extend_deadlines", lambda state, gap_ns, now_ns: None)]


def _nothing_is_kept() -> Patches:
    return [(Reservations, "promised", lambda self, account, key: 0)]


def _reclaim_from_guarantees() -> Patches:
    """Whatever is leased counts as borrowed, and who has borrowed least is asked."""

    def divide(worker: Worker, lenders: Any, short: int) -> Any:
        return [(min(lenders, key=lambda account: account.over), short)] if lenders else []

    return [(Account, "firm", property(lambda account: account.leased)), (reclaim, "_divide", divide)]


def _replay_without_generations() -> Patches:
    return [(entries, "judged", lambda same_generation, same_seal: same_seal)]


def _replay_without_seals() -> Patches:
    return [(entries, "judged", lambda same_generation, same_seal: same_generation)]


def _trees_miss_the_second_look() -> Patches:
    """What the log says is compared with what the worker had when it registered."""
    first: dict[int, tuple[Any, Any]] = {}

    def second_look(worker: Worker, ack: Any) -> Any:
        first[id(worker)] = worker.ledger.generations.copy(), worker.ledger.seal_words.copy()
        return original_look(worker, ack)

    def judge(self: Any, good_trees: list[bool], counts: Any) -> None:
        ledger = self.worker.ledger
        now = ledger.generations, ledger.seal_words
        ledger.generations, ledger.seal_words = first[id(self.worker)]
        original_judge(self, good_trees, counts)
        ledger.generations, ledger.seal_words = now

    original_look, original_judge = reattach._second_look, entries.Entries.judge
    return [(reattach, "_second_look", second_look), (entries.Entries, "judge", judge)]


# -- the scheduler


def _early_release() -> Patches:
    def close(self: Lifecycle, sequence: Any) -> None:
        original(self, sequence)
        self.release(sequence.lease)

    original = Lifecycle.close
    return [(Lifecycle, "close", close)]


def _early_publication() -> Patches:
    def plan(self: engine.SchedulerCore, now_ns: int) -> Any:
        plans = original(self, now_ns)
        for worker in self._life.workers.values():
            for sequence in worker.running.values():
                known = min(sequence.num_planned, sequence.request.num_tokens)
                sequence.fold()
                self._life.leases.filled(sequence.lease, known)
        return plans

    original = engine.SchedulerCore._plan
    return [(engine.SchedulerCore, "_plan", plan)]


def _lease_digest_ignored() -> Patches:
    return [(LeaseTable, "compare", lambda self, seen: None)]


def _forgets_to_release() -> Patches:
    def release(self: LeaseTable, lease: Any) -> None:
        if lease.lease_id[-8] % 4:
            original(self, lease)

    original = LeaseTable.release
    return [(LeaseTable, "release", release)]


def _reclaim_ignored() -> Patches:
    return [(engine, "give_back", lambda life, message, now_ns: None)]


# -- the worker


def _step_order_unchecked() -> Patches:
    def apply(self: WorkerCore, epoch: Any, plan: Any) -> Any:
        if epoch == self.planning:
            self._results.pop(plan.step, None)
            self._last_step = plan.step - 1
        return original(self, epoch, plan)

    original = WorkerCore.apply
    return [(WorkerCore, "apply", apply)]


def _fence_without_effect() -> Patches:
    def fence(self: WorkerCore, message: Fence) -> Any:
        return original(self, replace(message, scheduler_epochs=(), up_to_epoch=SchedulerEpoch(0), lease_ids=()))

    original = WorkerCore.fence
    return [(WorkerCore, "fence", fence)]


def _old_scheduler_plans_on() -> Patches:
    def attach_scheduler(self: WorkerCore, epoch: Any) -> Any:
        self._who.owner = SchedulerEpoch(0)
        self._who._highest = epoch
        return original(self, epoch)

    original = WorkerCore.attach_scheduler
    return [(WorkerCore, "attach_scheduler", attach_scheduler)]


def _no_generation_check() -> Patches:
    def current(self: BlockPool, handles: Any, *args: Any) -> BlockRefusal | None:
        return None

    return [(BlockPool, "why_not_write", current), (BlockPool, "why_not_read", current)]


def _no_seal_check() -> Patches:
    def why_not_read(self: BlockPool, handles: Any, seals: bytes) -> BlockRefusal | None:
        refusal = original(self, handles, seals)
        return refusal if refusal is not None and refusal.code.value == "stale" else None

    original = BlockPool.why_not_read
    return [(BlockPool, "why_not_read", why_not_read)]


_RESTARTS, _ABSENCES, _LOGS = FaultProfile.restarts(), FaultProfile.absences(), FaultProfile.cache_restarts()
_LIES = FaultProfile.lies_told()

MUTANTS = (
    Mutant("no fence wait", "I9: blocks are free before the fence is acknowledged", _no_fence_wait, _ABSENCES),
    Mutant("no epoch bits", "I4, rule 9: generations go on as reported", epoch_mutants.no_epoch_bits, _RESTARTS),
    Mutant("shared root", "I3: one tree for all domains", _shared_root),
    Mutant("salt not asked for", "I3: users of a domain share a tree", salt_mutants.not_asked_for, demands=True),
    Mutant("salts not kept apart", "I3: the cache takes them for one", salt_mutants.not_kept_apart, demands=True),
    Mutant("double release frees twice", "I10", _double_release_frees_twice),
    Mutant("no re-attach window", "rule 3: the ledger is open after a restart", _no_reattach_window, _RESTARTS),
    Mutant("pins protect nothing", "I2: what a live lease reads is evicted", _pinned_blocks_evicted),
    Mutant("no zeroing", "I15", _no_zeroing),
    Mutant("early release", "rule 2: released before the sequence was removed", _early_release),
    Mutant("early publication", "I8: published when planned", _early_publication),
    Mutant("forgets to release", "I18", _forgets_to_release),
    Mutant("copy omitted", "I12: a fork reads what its block had before", fork_mutants.copy_omitted),
    Mutant("more copied than agrees", "I12: a token of another prompt is read", fork_mutants.more_copied_than_agrees),
    Mutant("copy after the rows", "I12: the fork computes before it has the prompt", fork_mutants.copy_after_the_rows),
    Mutant("source released early", "rule 2: its copy has no result yet", fork_mutants.source_released_early),
    Mutant("fork of another domain, copied", "I19: neither core looks", fork_mutants.copy_of_another_domain),
    Mutant("step order unchecked", "rule 1: a doubled plan is applied again", _step_order_unchecked),
    Mutant("fence without effect", "I9: acknowledged and not done", _fence_without_effect, _ABSENCES),
    Mutant("queue without shares", "O3: others fill a tenant's share", queue_mutants.without_shares, demands=True),
    Mutant("reclaim from guarantees", "I14: who holds only its own is asked", _reclaim_from_guarantees),
    Mutant("replay without generations", "I5: the block was granted again", _replay_without_generations, _LOGS),
    Mutant("sessions are believed", "rule 9: a forged Hello", epoch_mutants.sessions_are_believed, _LIES),
    Mutant("registrations are believed", "rule 9: a forged one", epoch_mutants.registrations_are_believed, _LIES),
    Mutant("schedulers are believed", "rule 1: a forged scheduler epoch", epoch_mutants.schedulers_are_believed, _LIES),
    Mutant("eras are forgotten", "I4: numbers begin again", epoch_mutants.eras_are_forgotten, _LIES),
    Mutant("replay without seals", "I12: the worker has something else there", _replay_without_seals, _LOGS),
)

# Another protection covers the loss of each of these in whole runs; unit tests ask for it directly.
MASKED = (
    Mutant("fork of another domain", "I3: covered by the worker, which compares", fork_mutants.fork_of_another_domain),
    Mutant("fork of another salt", "I3: few seeds have one that is copied", salt_mutants.forks_across),
    Mutant("chain keys are believed", "I3: few logs name another tree's", epoch_mutants.chain_keys_are_believed),
    Mutant("copy source not compared", "I19: covered by a scheduler that is right", fork_mutants.sources_not_compared),
    Mutant("copy of what is gone", "I9: covered by plans close to each other", fork_mutants.copy_of_what_is_gone),
    Mutant("no generation check", "I5: covered by a ledger that is right", _no_generation_check),
    Mutant("no seal check", "I12: covered by generations", _no_seal_check),
    Mutant("no drain pins", "rule 7: covered by takeovers, which drop all readers", _no_drain_pins),
    Mutant("no second look", "rule 8: covered by the worker's own check", _no_second_look),
    Mutant("trees miss the second look", "rule 8: late plans are rare", _trees_miss_the_second_look),
    Mutant("shared claims are not judged", "rule 4: covered by the worker's own check", _shared_claim_at_least),
    Mutant("fenced sessions come back", "rule 3: covered by the worker", _fenced_sessions_come_back),
    Mutant("dead worker epochs forgotten", "rule 3: needs two restarts", epoch_mutants.dead_epochs_forgotten),
    Mutant("lost leases forgotten", "rule 3: needs two restarts", epoch_mutants.lost_leases_forgotten),
    Mutant("epoch not raised", "rule 9: covered by the registry of epochs", _epoch_not_raised),
    Mutant("no pause guard", "expiry is safe, only unkind", _no_pause_guard),
    Mutant("nothing is kept for a need", "I13: covered by asking again, and by luck", _nothing_is_kept),
    Mutant("lease digest ignored", "covered by links that lose nothing", _lease_digest_ignored),
    Mutant("old scheduler plans on", "covered by sessions, which end with the takeover", _old_scheduler_plans_on),
)

# Not a protection, but a client that does not do what it is asked: everybody must get on all the same.
RECLAIM_IGNORED = Mutant("reclaim ignored", "nobody gives back what was borrowed", _reclaim_ignored)
