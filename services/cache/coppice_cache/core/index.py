"""The cache service's core: which tokens are where, and who owns each block.

    edge                              core
    attach_client, receive_client --> sessions, ops -----------> take_effects() --> messages to send
    receive_worker, heard_worker  --> registration, fences          ^
    tick                          --> expiry, windows, heartbeats --'

Synchronous and deterministic: time comes in as `now_ns` of a monotonic clock, everything else goes out as effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerId
from coppice.messages.cell import Served
from coppice.messages.index import (
    Answer,
    AnswerBatch,
    FromClient,
    LeaseSet,
    MatchHints,
    MatchQueries,
    Op,
    OpBatch,
    Reattach,
    Reattached,
)
from coppice.messages.ownership import Succeed, Yielded
from coppice.messages.registration import CopiesDone, Draining, FromWorker, Register
from coppice.session.frames import Hello
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.events import IndexEvent, Stored, Tier
from coppice_cache.core.base.results import (
    Effect,
    Explanation,
    IndexStats,
    Match,
    PinView,
    TreeDump,
)
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.base.statements import Statement
from coppice_cache.core.inspection.audit import Looked, audit, check_state
from coppice_cache.core.inspection.block_map import BlockMap, copy_map
from coppice_cache.core.inspection.explain import explain
from coppice_cache.core.inspection.snapshots import Cursor, next_slice
from coppice_cache.core.inspection.tree_pages import Listings, dump_page
from coppice_cache.core.inspection.views import gather_statement, gather_stats
from coppice_cache.core.ops.domains import set_domains
from coppice_cache.core.ops.hints import match_all
from coppice_cache.core.ops.invalidation import invalidate
from coppice_cache.core.ops.offload import copies_done
from coppice_cache.core.ops.ops import abandon, drop_claim, execute, execute_unknown
from coppice_cache.core.ops.pins import pin, unpin, view_pins
from coppice_cache.core.ops.waits import matchable_bytes
from coppice_cache.core.radix.tree import walk
from coppice_cache.core.recovery.clock import Clock
from coppice_cache.core.recovery.lifetimes import attach_session, end_session, end_worker, succeed
from coppice_cache.core.recovery.ownership import share_out, yielded
from coppice_cache.core.recovery.reattach import close_windows, reattach
from coppice_cache.core.recovery.registration import acknowledge, drain, register
from coppice_cache.core.state.cell import take_served, tell_planners
from coppice_cache.core.state.replay import ReplayCounts
from coppice_cache.core.state.sessions import FIRST_EPOCHS, Session, minted_by
from coppice_cache.core.state.state import PinSpec, State

_NO_MATCH = Match(0, 0)


class IndexCore:
    """One incarnation. `MessageRefused` from any receive method means: nothing was applied, end that connection.

    `first_epoch`, below `FIRST_EPOCHS`, is where the scheduler and worker epochs that it mints begin. A service draws
    it at random: two incarnations that took the same cache epoch, since its counter was lost, mint different ones all
    the same. An epoch that names two schedulers would be spared at a worker for one of them, and cover what the other
    left there.
    """

    def __init__(self, settings: CoreSettings, cache_epoch: CacheEpoch, now_ns: int, first_epoch: int = 0) -> None:
        assert 0 <= first_epoch < FIRST_EPOCHS
        self.cache_epoch = cache_epoch
        self.names_owners = True  # False: as in the version before, where no worker has an owner; for the simulator
        self.state = State(settings, cache_epoch, now_ns, first_epoch)
        self._clock = Clock(now_ns)
        self._listings = Listings()

    def _flush(self) -> None:
        """At the end of each call: who plans where, then what was collected."""
        if self.state.owners_changed:
            self.state.owners_changed = False
            if self.names_owners:
                share_out(self.state)
        if self.state.planners_changed and self.names_owners:
            self.state.planners_changed = False
            tell_planners(self.state)
        self.state.flush()

    # sessions of schedulers and other clients

    def believed(self, hello: Hello) -> tuple[CacheEpoch, SchedulerEpoch]:
        """The cache epoch that a peer was attached to, and the session's; 0 and 0 of one that shows no voucher."""
        shown = (hello.voucher, hello.key, hello.incarnation, hello.epoch)
        if not hello.voucher or not self.state.vouchers.is_of_session(*shown):
            return CacheEpoch(0), SchedulerEpoch(0)
        return minted_by(hello.incarnation), SchedulerEpoch(hello.epoch)

    def attach_client(
        self, claimed: SchedulerEpoch, now_ns: int, *, plans: bool = True, may_yield: bool = True
    ) -> SchedulerEpoch:
        """Start or resume a session; 0 claims nothing. Another epoch than claimed means that the claimed one is dead.

        `plans`: it is a scheduler's. Workers hear when it ends, whether it held something there or not. `may_yield`:
        it speaks a protocol in which workers have owners, so it gives one up when it is asked to.

        Raises MessageRefused when there are too many sessions.
        """
        self.state.call_time.advance(now_ns)
        epoch = attach_session(self.state, claimed, now_ns, plans=plans, may_yield=may_yield)
        self._flush()
        return epoch

    def heard_client(self, epoch: SchedulerEpoch, now_ns: int) -> None:
        session = self.state.sessions.get(epoch)
        if session is not None:
            session.last_heard_ns = max(session.last_heard_ns, now_ns)

    def receive_client(self, epoch: SchedulerEpoch, message: FromClient, now_ns: int) -> None:
        """One message of a session; answers come as effects. Raises MessageRefused."""
        self.heard_client(epoch, now_ns)
        self.state.call_time.advance_in_steps(now_ns)
        session = self.state.sessions.get(epoch)
        if isinstance(message, OpBatch):
            self._receive_batch(epoch, message, now_ns)
        elif isinstance(message, MatchQueries):
            self.state.tell_client(epoch, match_all(self.state, message))
        elif isinstance(message, Succeed):
            succeed(self.state, epoch, message)
            close_windows(self.state, now_ns)
        elif isinstance(message, Yielded):
            if session is not None:
                yielded(self.state, session, message)
        elif isinstance(message, Served):
            if session is not None:
                take_served(self.state, session, message)
        elif session is None:
            named = message.lease_ids if isinstance(message, LeaseSet) else [c.lease_id for c in message.claims]
            self.state.tell_client(epoch, Reattached(self.cache_epoch, (), tuple(named)))
        elif isinstance(message, Reattach):
            reattach(self.state, session, message, now_ns)
        else:
            self._reconcile(session, message)
        self._flush()

    def end_client(self, epoch: SchedulerEpoch, now_ns: int) -> None:
        """Goodbye: like expiry, at once."""
        self.state.call_time.advance(now_ns)
        end_session(self.state, epoch)
        self._flush()

    def execute(self, epoch: SchedulerEpoch, op: Op, now_ns: int) -> Answer:
        """One op, answered at once."""
        self.state.call_time.advance_in_steps(now_ns)
        answer = self._execute(epoch, op, now_ns)
        self._flush()
        return answer

    def match(self, domain: DomainId, namespace: Namespace, tokens: bytes, worker_id: WorkerId) -> Match:
        """What `acquire` of these packed tokens would share on this worker. Reads only."""
        worker = self.state.workers.get(worker_id)
        if worker is None:
            return _NO_MATCH
        tree = worker.find_tree(domain, self.state.with_keyed_salt(domain, namespace))
        if tree is None:
            return _NO_MATCH
        position = walk(tree, tokens, worker.block_bytes, matchable_bytes(tokens, worker.block_bytes))
        return Match(position.num_blocks * worker.block_size, position.num_blocks)

    def match_all(self, queries: MatchQueries) -> MatchHints:
        """Hints for several prompts, on all workers. Reads only. Raises MessageRefused."""
        return match_all(self.state, queries)

    # what operators ask for

    def set_domains(self, configs: tuple[DomainConfig, ...], now_ns: int) -> None:
        """Other domains, or other shares of them, from now on. Raises SettingsRefused; nothing changed then."""
        self.state.call_time.advance(now_ns)
        set_domains(self.state, configs, now_ns)
        self._flush()

    def invalidate(
        self,
        *,
        now_ns: int,
        domain: DomainId | None = None,
        namespace: Namespace | None = None,
        tokens: bytes | None = None,
    ) -> int:
        """Forget all, a domain, a namespace with its salts, both, or what follows a prefix. Raises MessageRefused."""
        self.state.call_time.advance(now_ns)
        count = invalidate(self.state, domain, namespace, tokens, now_ns)
        self._flush()
        return count

    def pin(self, name: str, domain: DomainId, namespace: Namespace, tokens: bytes, now_ns: int) -> int:
        """Keep this prefix (packed u32) from now on; returns how many tokens of it are held. Raises MessageRefused."""
        self.state.call_time.advance(now_ns)
        count = pin(self.state, PinSpec(name, domain, namespace, tokens))
        self._flush()
        return count

    def unpin(self, name: str, now_ns: int) -> bool:
        """False: there is no such pin."""
        self.state.call_time.advance(now_ns)
        found = unpin(self.state, name)
        self._flush()
        return found

    def pins(self) -> tuple[PinView, ...]:
        return view_pins(self.state)

    # workers

    def receive_worker(self, worker_id: WorkerId, message: FromWorker, now_ns: int) -> None:
        """Raises MessageRefused."""
        self.heard_worker(worker_id, now_ns)
        self.state.call_time.advance(now_ns)
        if isinstance(message, Register):
            register(self.state, worker_id, message, now_ns)
        elif isinstance(message, Draining):
            drain(self.state, worker_id, message)
        elif isinstance(message, CopiesDone):
            self._copies_done(worker_id, message, now_ns)
        else:
            acknowledge(self.state, worker_id, message, now_ns)
        self._flush()

    def heard_worker(self, worker_id: WorkerId, now_ns: int) -> None:
        worker = self.state.workers.get(worker_id)
        if worker is not None:
            worker.last_heard_ns = max(worker.last_heard_ns, now_ns)

    def end_worker(self, worker_id: WorkerId, now_ns: int) -> None:
        """Goodbye: its epoch is dead at once."""
        self.state.call_time.advance(now_ns)
        end_worker(self.state, worker_id)
        self._flush()

    # time and effects

    def tick(self, now_ns: int) -> None:
        """Call several times per heartbeat."""
        self.state.call_time.advance(now_ns)
        self._clock.tick(self.state, now_ns)
        self._flush()

    def dismantle(self, before: IndexCore) -> None:
        """Take the trees of the incarnation that this one replaces apart, in slices with each tick.

        What its workers had not asked for yet of the log waits for them here, and what operators said stays said.
        """
        self.state.replay = before.state.replay
        self.state.aside = before.state.aside
        self.state.incarnations = before.state.incarnations
        self.state.pins = before.state.pins
        self.state.dismantling += before.state.dismantling
        for worker in before.state.workers.values():
            self.state.dismantling += worker.leave()

    def take_effects(self) -> list[Effect]:
        """What happened since the last call, in order."""
        effects, self.state.effects = self.state.effects, []
        return effects

    def take_events(self) -> list[IndexEvent]:
        """How the trees changed since the last call, in order. Empty where `record_events` is off."""
        events = self.state.events
        if not events:
            return []
        taken = events.copy()
        events.clear()  # the workers hold this very list
        return taken

    def load_replay(self, by_worker: Mapping[WorkerId, Sequence[IndexEvent]]) -> None:
        """What the log of earlier incarnations says, in order. Before anybody registers; nothing in it is trusted."""
        for worker_id, events in by_worker.items():
            self.state.replay.load(self.state.settings.seal_keys, worker_id, events)

    @property
    def is_replaying(self) -> bool:
        """Whether some of what was loaded waits for its worker."""
        return bool(self.state.replay.worker_ids)

    @property
    def replay_counts(self) -> ReplayCounts:
        return self.state.replay.counts

    def snapshot_slice(self, cursor: Cursor | None, max_blocks: int) -> tuple[list[Stored], Cursor | None]:
        """Part of what is findable now, about `max_blocks` blocks of it, and where the next slice goes on.

        None begins, None ends. What changes between slices is in the events; see `snapshots`.
        """
        return next_slice(self.state, cursor, max_blocks)

    # for operators and tests

    def check(self) -> None:
        """Recompute everything that is derivable. Raises InvariantBroken. Cost: all blocks, nodes and leases."""
        check_state(self.state)

    def audit(self, looked: Looked) -> Iterator[None]:
        """The same in small steps, between which other calls may come. Raises InvariantBroken from any step."""
        return audit(self.state, looked)

    def stats(self) -> IndexStats:
        return gather_stats(self.state)

    def statement(self, now_ns: int) -> Statement:
        """What each domain held, and for how long, since this incarnation began. Cost: workers times their domains."""
        return gather_statement(self.state, now_ns)

    def block_map(self, worker_id: WorkerId, tier: Tier = Tier.DEVICE) -> BlockMap | None:
        """What every block of a tier of a worker is now; None: there is no such pool."""
        return copy_map(self.state, worker_id, tier)

    def tree(
        self,
        domain: DomainId,
        *,
        max_depth: int,
        limit: int,
        page_token: str = "",
        worker_id: WorkerId | None = None,
    ) -> TreeDump:
        """A page over the domain's trees, of at most `limit` nodes, `max_depth` below each root.

        Raises MessageRefused for a page token that is none.
        """
        return dump_page(
            self.state, self._listings, domain, max_depth=max_depth, limit=limit, token=page_token, worker_id=worker_id
        )

    def explain(self, domain: DomainId, namespace: Namespace | None, tokens: bytes) -> tuple[Explanation, ...]:
        """What a prompt (packed u32) would find on each worker, and why not more. Raises MessageRefused."""
        return explain(self.state, domain, namespace, tokens)

    def _receive_batch(self, epoch: SchedulerEpoch, batch: OpBatch, now_ns: int) -> None:
        if len(batch.ops) > self.state.settings.ops_per_batch_max:
            raise MessageRefused(f"{len(batch.ops)} ops in a batch; at most {self.state.settings.ops_per_batch_max}")
        answers = tuple([self._execute(epoch, op, now_ns) for op in batch.ops])
        self.state.tell_client(epoch, AnswerBatch(self.cache_epoch, answers))

    def _execute(self, epoch: SchedulerEpoch, op: Op, now_ns: int) -> Answer:
        session = self.state.sessions.get(epoch)
        if session is None:
            return execute_unknown(op)
        if now_ns > session.last_heard_ns:
            session.last_heard_ns = now_ns
        return execute(self.state, session, op, now_ns)

    def _copies_done(self, worker_id: WorkerId, message: CopiesDone, now_ns: int) -> None:
        worker = self.state.workers.get(worker_id)
        if worker is not None and worker.epoch == message.worker_epoch:
            copies_done(self.state, worker, message, now_ns)

    def _reconcile(self, session: Session, message: LeaseSet) -> None:
        """Leases that only one side knows die."""
        limit = self.state.settings.leases_per_session_max
        if len(message.lease_ids) > limit:
            raise MessageRefused(f"{len(message.lease_ids)} leases in a set; at most {limit}")
        listed = set(message.lease_ids)
        for lease_id, lease in tuple(session.leases.items()):
            if lease_id not in listed:
                abandon(self.state, session, session.workers[lease_id], lease)
        for lease_id in tuple(session.claims):
            if lease_id not in listed:
                drop_claim(self.state, session, lease_id)
        unknown = tuple(i for i in message.lease_ids if i not in session.leases and i not in session.claims)
        if unknown:
            self.state.tell_client(session.epoch, Reattached(self.cache_epoch, (), unknown))
