"""A plain model of the cache: what clients and workers said and were told, in dicts and sets, and what follows from it.

It decides nothing. It knows which tokens each handle stands for, who reads and who writes which block, who waits, and
what can have been evicted; so it can say of every answer whether it may be true. A key is (domain, namespace, tokens):
one findable block, named by all tokens up to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from coppice.ids import DomainId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Answer,
    AnswerBatch,
    Distrust,
    Extend,
    Extended,
    Gone,
    Grant,
    NoCapacity,
    NotPublished,
    Op,
    Pending,
    Publish,
    Published,
    Reattached,
    Release,
    Released,
    Wake,
)
from coppice.messages.registration import CopyOrder, CopyOrders, Fence
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import Effect, ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.index import IndexCore
from tests.unit.cache.books import WAYS, Job, Key, LeaseKey, ModelLease, Place, block_of, common, handles
from tests.unit.cache.world import KEY


class Model:
    def __init__(self, core: IndexCore, block_size: int) -> None:
        self.core, self.block_size, self.block_bytes = core, block_size, 4 * block_size
        self.live: dict[LeaseKey, ModelLease] = {}
        self.drained: dict[LeaseKey, ModelLease] = {}
        self.dead: list[ModelLease] = []
        self.content: dict[tuple[Place, int], Key] = {}  # by handle; of what was written and said to be full
        self.found: dict[Place, set[Key]] = {}
        self.newest: dict[tuple[Place, int], int] = {}  # highest handle of each block
        self.waiting: dict[LeaseKey, tuple[int, Acquire, Pending]] = {}  # since when
        self.jobs: dict[int, Job] = {}
        self.fences: list[tuple[WorkerId, Fence]] = []
        self.unanswered: set[tuple[WorkerId, WorkerEpoch, int]] = set()
        self.orders: list[tuple[WorkerId, WorkerEpoch, int]] = []
        self.may_appear: dict[Place, set[Key]] = {}
        self.happened: Counter[str] = Counter()

    def held(self) -> Iterator[ModelLease]:
        yield from self.live.values()
        yield from self.drained.values()

    def keys_of(self, domain: DomainId, namespace: Namespace, tokens: bytes) -> list[Key]:
        """One per whole block."""
        ends = range(self.block_bytes, len(tokens) + 1, self.block_bytes)
        return [(domain, namespace, tokens[:end]) for end in ends]

    def longest(self, place: Place, domain: DomainId, namespace: Namespace, tokens: bytes) -> int:
        """Blocks that a match may find: never the last token."""
        count = 0
        for key in self.keys_of(domain, namespace, tokens[:-4]):
            if key not in self.found.get(place, ()):
                break
            count += 1
        return count

    def busy(self, place: Place) -> set[int]:
        """Blocks that somebody reads or writes, or that wait for a fence."""
        blocks = set()
        for lease in self.held():
            if lease.place == place:
                blocks |= {block_of(handle) for handle in lease.handles}
                blocks |= {block_of(handle) for handle in handles(lease.grant.copy_source) if lease.copy_key}
        for job in self.jobs.values():
            if job.source == place:
                blocks |= {block_of(handle) for handle in handles(job.order.src)}
            if job.target == place:
                blocks |= {block_of(handle) for handle in handles(job.order.dst)}
        return blocks

    def protected(self, place: Place) -> set[Key]:
        """What must not be evicted now."""
        keys: set[Key] = set()
        for lease in self.held():
            if lease.place == place and not lease.gone:
                settled = lease.tokens[: lease.settled * self.block_bytes]
                keys.update(self.keys_of(lease.op.domain, lease.op.namespace, settled))
                if lease.copy_key is not None:
                    keys.update(self.keys_of(*lease.copy_key))
        for job in self.jobs.values():
            if job.source == place and job.source_keys:
                keys.update(self.keys_of(*job.source_keys[-1]))
        for view in self.core.pins():
            spec = self.core.state.pins.by_name[view.name]
            if (view.worker_id, Tier.DEVICE) == place:
                keys.update(self.keys_of(spec.domain, spec.namespace, spec.tokens[: 4 * view.num_tokens]))
        return keys

    # ---- what is granted

    def fresh(self, place: Place, owned: bytes, busy: set[int]) -> list[int]:
        """New occupancies of blocks that nobody uses (I4, I7, I9)."""
        for handle in handles(owned):
            block = block_of(handle)
            assert block not in busy, f"block {block} of {place} is granted while it is used"
            busy.add(block)
            assert handle > self.newest.get((place, block), 0), "a generation came twice"
            self.newest[place, block] = handle
        return handles(owned)

    def granted(self, epoch: SchedulerEpoch, op: Acquire, grant: Grant) -> None:
        known = self.live.get((epoch, op.lease_id))
        if known is not None:
            assert grant == known.grant, "a repeated acquire got another grant (I10)"
            return
        assert (epoch, op.lease_id) not in self.drained, "a lease that drains was granted again"
        place = (grant.worker_id, Tier.DEVICE)
        assert grant.worker_id in {candidate.worker_id for candidate in op.candidates}
        shared, count = handles(grant.shared), grant.num_cached_tokens // self.block_size
        expected = self.keys_of(op.domain, op.namespace, op.tokens[:-4])[:count]
        assert [self.content.get((place, handle)) for handle in shared] == expected, "foreign or stale blocks (I12)"
        assert set(expected) <= self.found[place], "what was invalidated is shared"
        assert grant.shared_seals == self.seals(op.domain, op.namespace, op.tokens[: count * self.block_bytes])
        busy = self.busy(place) | {block_of(handle) for handle in shared}
        owned = self.fresh(place, grant.owned, busy)
        assert len(shared) + len(owned) == -(-op.reserve_tokens // self.block_size)
        lease = ModelLease(op, epoch, grant, shared + owned, count, op.tokens)
        lease.path = shared.copy()
        if grant.copy_source:
            lease.copy_key = self.copied(place, op, grant)
        self.live[lease.key] = lease
        self.happened.update({"shared": count > 0, "no match wanted": op.skip_match})

    def copied(self, place: Place, op: Acquire, grant: Grant) -> Key:
        """The source continues the match for exactly as many tokens as were said."""
        (source,) = handles(grant.copy_source)
        key = self.content[place, source]
        assert op.wants_copy > op.skip_match
        assert key in self.found[place]
        assert key[:2] == (op.domain, op.namespace), "a copy source of somebody else (I3)"
        start, agree = 4 * grant.num_cached_tokens, common(key[2], op.tokens[:-4])
        assert len(key[2]) == start + self.block_bytes
        assert agree == start + 4 * grant.num_copy_tokens > start
        assert grant.copy_seal == self.seals(*key)[-16:]
        self.happened["copy source"] += 1
        return key

    def seals(self, domain: DomainId, namespace: Namespace, tokens: bytes) -> bytes:
        return chain_seals(chain_key(KEY, domain, namespace), NO_SEAL, tokens, self.block_bytes)

    # ---- answers

    def said(self, epoch: SchedulerEpoch, op: Op, answer: Answer, now_ns: int) -> None:
        """One op and its answer, in order."""
        key = (epoch, op.lease_id)
        if isinstance(op, Acquire):
            if isinstance(answer, Pending):
                self.happened["pending"] += 1
                assert op.may_wait > op.skip_match
                assert key not in self.live
                self.waiting[key] = (self.waiting[key][0] if key in self.waiting else now_ns, op, answer)
                return
            self.waiting.pop(key, None)
            if isinstance(answer, Grant):
                self.granted(epoch, op, answer)
            elif isinstance(answer, NoCapacity):
                self.happened[answer.reason.value] += 1
                assert answer.retry_after_ms > 0
            else:
                assert isinstance(answer, Gone)
                assert key in self.drained
            return
        lease = self.live.get(key)
        if isinstance(op, Release | Abandon):
            assert answer == Released(op.lease_id)
            self.waiting.pop(key, None)
            if lease is not None:
                del self.live[key]
                if isinstance(op, Release):
                    self.dead.append(lease)
                else:
                    self.drained[key] = lease
        elif isinstance(op, Extend | Publish) and lease is None:
            assert answer == Gone(op.lease_id), "an op on a dead lease had an effect (I5)"
        elif isinstance(op, Extend) and lease is not None:
            self.extended(lease, op, answer)
        elif isinstance(op, Publish) and lease is not None:
            self.published(lease, op, answer)
        elif isinstance(op, Distrust) and lease is not None:
            self.distrusted(lease, op)

    def extended(self, lease: ModelLease, op: Extend, answer: Answer) -> None:
        if isinstance(answer, NoCapacity):
            return
        assert isinstance(answer, Extended)
        if lease.extended is not None and lease.extended[0] == op:
            assert answer == lease.extended[1], "a repeated extend got another answer (I10)"
            return
        assert answer.first_block == len(lease.handles)
        lease.handles += self.fresh(lease.place, answer.owned, self.busy(lease.place))
        assert len(lease.handles) >= -(-op.reserve_tokens // self.block_size)
        if answer.owned:
            lease.extended = (op, answer)

    def published(self, lease: ModelLease, op: Publish, answer: Answer) -> None:
        domain, namespace = lease.op.domain, lease.op.namespace
        if lease.gone or self.core.state.domains.config(domain).mode is Mode.DISABLED:
            assert isinstance(answer, NotPublished), "a publication into a tree that is gone"
            self.happened["publication refused"] += lease.gone
            return
        assert isinstance(answer, Published), answer
        end = op.first_block + op.num_named_blocks + len(op.tokens) // self.block_bytes
        again = [then for said, then in lease.done if said == op]
        if again:
            assert (answer.handles, answer.seals) == (again[0].handles, again[0].seals)
            return
        lease.tokens = lease.tokens_after(op, self.block_bytes)
        for index, key in list(enumerate(self.keys_of(domain, namespace, lease.tokens)))[lease.settled : end]:
            if key not in self.found.setdefault(lease.place, set()):
                self.found[lease.place].add(key)
                self.content[lease.place, lease.handles[index]] = key
                lease.mine.add(index)
            lease.path.append(self.standing(lease.place, key))
        if end > lease.settled:
            lease.copy_key = None
        lease.settled = max(lease.settled, end)
        own = [lease.handles[index] for index in range(op.first_block, end) if index in lease.mine]
        assert (answer.num_published_blocks, handles(answer.handles)) == (lease.settled, own)
        lease.done.append((op, answer))

    def distrusted(self, lease: ModelLease, op: Distrust) -> None:
        """The first accused block that the lease reads and all that follows it are gone, on this device only."""
        keys = self.keys_of(lease.op.domain, lease.op.namespace, lease.tokens)
        for key, handle in zip(keys, lease.path, strict=False):
            if self.standing(lease.place, key) != handle:
                return  # invalidated from here on
            if handle in handles(op.handles):
                self.happened["distrusted"] += 1
                self.forget([lease.place], key)
                return

    def standing(self, place: Place, key: Key) -> int:
        """The handle under which the key is found now; 0 when it is not."""
        known = [handle for (where, handle), other in self.content.items() if where == place and other == key]
        return known[-1] if known and key in self.found[place] else 0

    def forget(self, places: Iterable[Place], below: Key) -> None:
        """Whatever starts with this key is found by nobody."""

        def hit(key: Key) -> bool:
            return key[:2] == below[:2] and key[2].startswith(below[2])

        for place in places:
            self.found[place] = {key for key in self.found.get(place, ()) if not hit(key)}
            for lease in self.held():
                settled = lease.tokens[: lease.settled * self.block_bytes]
                if lease.place == place:
                    lease.gone |= hit((lease.op.domain, lease.op.namespace, settled))
                    if lease.copy_key is not None and hit(lease.copy_key):
                        lease.copy_key = (lease.copy_key[0], lease.copy_key[1], b"")
            for job in self.jobs.values():
                if job.source == place and any(hit(key) for key in job.source_keys):
                    job.keys, job.source_keys = set(), []

    def invalidated(self, domain: DomainId | None, namespace: Namespace | None) -> None:
        def hit(other: DomainId, name: Namespace) -> bool:
            return domain in (None, other) and namespace in (None, name)

        for place, keys in self.found.items():
            self.found[place] = {key for key in keys if not hit(key[0], key[1])}
        for lease in self.held():
            if hit(lease.op.domain, lease.op.namespace):
                lease.gone = True
        for job in self.jobs.values():
            if any(hit(key[0], key[1]) for key in job.source_keys):
                job.keys, job.source_keys = set(), []

    # ---- effects

    def effect(self, effect: Effect, now_ns: int) -> None:
        if isinstance(effect, ToClientEffect):
            message = effect.message
            if isinstance(message, Wake):
                for lease_id in message.lease_ids:
                    self.happened["woken"] += 1
                    assert self.waiting.pop((effect.epoch, lease_id), None), "somebody was woken who does not wait"
            elif isinstance(message, Reattached):
                for lease_id in message.refused:
                    lease = self.live.pop((effect.epoch, lease_id), None)
                    if lease is not None:
                        self.happened["taken away"] += 1
                        self.drained[lease.key] = lease
            assert not isinstance(message, AnswerBatch), "answers of a batch are taken by who sent it"
        elif isinstance(effect, ToWorkerEffect):
            if isinstance(effect.message, Fence):
                self.fenced(effect.worker_id, effect.message)
            elif isinstance(effect.message, CopyOrders):
                for order in effect.message.orders:
                    self.ordered(effect.worker_id, effect.message.worker_epoch, order)

    def fenced(self, worker_id: WorkerId, fence: Fence) -> None:
        name = (worker_id, fence.worker_epoch, fence.fence_id)
        if (worker_id, fence) in self.fences:
            return  # said again after a reconnect
        self.fences.append((worker_id, fence))
        self.unanswered.add(name)
        for key in [key for key in self.live if key[0] in fence.scheduler_epochs]:
            if self.live[key].grant.worker_id == worker_id:
                self.drained[key] = self.live.pop(key)
        for (epoch, lease_id), lease in self.drained.items():
            named = lease_id in fence.lease_ids or epoch in fence.scheduler_epochs
            if named and lease.fence is None and lease.grant.worker_id == worker_id:
                lease.fence = (worker_id, fence.fence_id)

    def acknowledged(self, worker_id: WorkerId, fence: Fence) -> None:
        """Called before the core hears of it; whether it counts is known here."""
        name = (worker_id, fence.worker_epoch, fence.fence_id)
        worker = self.core.state.workers.get(worker_id)
        if name not in self.unanswered or worker is None or worker.epoch != fence.worker_epoch:
            return
        self.unanswered.remove(name)
        for key in [key for key, lease in self.drained.items() if lease.fence == (worker_id, fence.fence_id)]:
            self.happened["fenced"] += 1
            self.dead.append(self.drained.pop(key))

    def ordered(self, worker_id: WorkerId, worker_epoch: WorkerEpoch, order: CopyOrder) -> None:
        if order.order_id in self.jobs:
            assert self.jobs[order.order_id].order == order, "an order was said again, and differently"
            return
        source, target = ((worker_id, tier) for tier in WAYS[order.direction])
        keys = [self.content[source, handle] for handle in handles(order.src)]
        assert all(key in self.found[source] for key in keys), "what is copied cannot be found"
        assert not any(self.core.state.domains.config(key[0]).wipes for key in keys)
        whole = keys[-1]
        assert keys == self.keys_of(*whole)[-len(keys) :]
        assert order.seals == self.seals(*whole)[-16 * len(keys) :]
        self.fresh(target, order.dst, self.busy(target))
        assert len(order.dst) == len(order.src)
        self.orders.append((worker_id, worker_epoch, order.order_id))
        self.jobs[order.order_id] = Job(worker_id, worker_epoch, order, source, target, keys, set(keys))
        self.happened[order.direction.value] += 1

    def copied_or_not(self, order_id: int, *, failed: bool) -> None:
        """Called before the core hears of it."""
        job = self.jobs.pop(order_id, None)
        if job is None:
            return
        if not failed:
            for key, handle in zip(sorted(job.keys, key=lambda key: len(key[2])), handles(job.order.dst), strict=False):
                if key not in self.found[job.target]:
                    self.content[job.target, handle] = key
            self.may_appear.setdefault(job.target, set()).update(job.keys)
        elif job.goes_up and job.source_keys:
            self.forget([job.source], job.source_keys[0])

    def ended(self, epoch: SchedulerEpoch) -> None:
        for key in [key for key in self.waiting if key[0] == epoch]:
            del self.waiting[key]

    def died(self, worker_id: WorkerId) -> None:
        """Its epoch is over, and all that it had."""
        for books in (self.live, self.drained):
            for key in [key for key, lease in books.items() if lease.grant.worker_id == worker_id]:
                self.dead.append(books.pop(key))
        for order_id in [order_id for order_id, job in self.jobs.items() if job.worker_id == worker_id]:
            del self.jobs[order_id]
        for place in [(worker_id, tier) for tier in Tier]:
            self.found.pop(place, None)
            self.content = {key: value for key, value in self.content.items() if key[0] != place}

    # ---- after every step

    def learn(self, truth: dict[Place, set[Key]]) -> None:
        """What is findable now is what was, less what may have been evicted, and what a finished copy brought."""
        for place in {*truth, *self.found}:
            now, before = truth.get(place, set()), self.found.get(place, set())
            appeared = now - before
            assert appeared <= self.may_appear.get(place, set()), f"findable in {place} and should not be: {appeared}"
            gone = before - now
            wrong = gone & self.protected(place)
            assert not wrong, f"evicted from {place} although somebody needs it: {wrong}"
            self.happened["evicted"] += len(gone)
            self.found[place] = set(now)
            for key in now:
                assert len(key[2]) == self.block_bytes or (*key[:2], key[2][: -self.block_bytes]) in now, "I11"
        self.may_appear.clear()
