"""What a worker's Register means, and what its FenceAck ends.

worker_epoch 0, or no voucher        a new pool: a new epoch, open at once
the epoch that is live here          a reconnect: kept when every difference can be explained
unknown here, of an earlier epoch    we restarted: closed ledger, window (rule 3)
anything else                        that epoch is dead, here or as some session was told: a new one

Only what a voucher proves is believed, so the epochs that a worker names are epochs that we gave out.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from coppice.handles import COUNTER_BITS, epoch_in_era, era_of
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import DeadWorker
from coppice.messages.registration import Direction, Draining, FenceAck, Register
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import Reincarnate
from coppice_cache.core.eviction.adaptive import POLICIES
from coppice_cache.core.ops.reclaim import end_reservations_of_acquires
from coppice_cache.core.pool.changes import Changes
from coppice_cache.core.pool.free_ring import unpack_blocks
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import Quotas
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.recovery.lifetimes import end_worker, finish_fenced
from coppice_cache.core.recovery.ownership import tell_registered
from coppice_cache.core.recovery.reattach import accept_window_ack, close_windows, judge_held_claims
from coppice_cache.core.recovery.regrowth import regrow_disk
from coppice_cache.core.state.replay import Forest
from coppice_cache.core.state.sessions import minted_by
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import LowerTier, Phase, Window, Worker


def register(state: State, worker_id: WorkerId, message: Register, now_ns: int) -> None:
    """Raises MessageRefused for a message that contradicts itself or a limit."""
    _check(state, worker_id, message)
    said = message
    message, is_ours = believed(state, message)
    highest = message.highest_cache_epoch
    if highest >= state.cache_epoch and not is_ours:
        if highest >= state.reincarnate_above:
            state.reincarnate_above = CacheEpoch(highest + 1)
            state.effects.append(Reincarnate(state.reincarnate_above))
        return
    worker = before = state.workers.get(worker_id)
    if worker is not None and worker.epoch == message.worker_epoch and _is_explained(worker, message):
        _reconnect(state, worker, message, now_ns)
        return
    if worker is not None:
        end_worker(state, worker_id)
    elif len(state.workers) >= state.settings.workers_max:
        raise MessageRefused(f"{len(state.workers)} workers are registered, the maximum")
    survived = not is_ours and _survived(state, message)
    epoch = message.worker_epoch if survived else state.mint_worker_epoch()
    reported = message if survived else _as_new(message)  # of another epoch it begins again, whatever it was
    on_disk = None if survived else _on_disk(state, said)
    if on_disk is not None:
        reported = replace(reported, disk_generations=said.disk_generations, disk_seals=said.disk_seals)
    worker = _new_worker(state, reported, epoch, now_ns, survived=survived)
    if on_disk is not None:
        worker.kept_from = said.disk_epoch
        regrow_disk(state, worker, on_disk, now_ns)
    worker.owner = _owner_of(message, survived, before)
    state.workers[worker_id] = worker
    state.remember_worker(worker_id)
    state.workers_changed = state.owners_changed = True
    tell_registered(state, worker)
    if worker.is_open:
        state.drop_replay(worker_id)
    judge_held_claims(state, worker, now_ns)
    close_windows(state, now_ns)


def believed(state: State, message: Register) -> tuple[Register, bool]:
    """What a voucher proves, and whether it is this incarnation's; without one the pool counts as new.

    A worker opens what was granted after it has heard of the registration, so no generation of it is of a later epoch
    than the one that registered it last.
    """
    if not message.worker_epoch:
        return _as_new(message), False
    epochs = message.worker_epoch, message.highest_cache_epoch
    incarnation = state.vouchers.registered_by(message.voucher, message.worker_id, *epochs)
    arrays = (message.generations, message.host_generations, message.disk_generations)
    newest = max((int(np.frombuffer(array, "<u8").max()) >> COUNTER_BITS for array in arrays if array), default=0)
    if incarnation is None or newest > epoch_in_era(message.highest_cache_epoch):
        state.unproved_registrations += 1
        return _as_new(message), False
    is_ours = incarnation == state.incarnation and message.highest_cache_epoch == state.cache_epoch
    return message, is_ours


def _as_new(message: Register) -> Register:
    """The same of a pool that was never used."""
    return replace(
        message,
        worker_epoch=WorkerEpoch(0),
        highest_cache_epoch=CacheEpoch(0),
        generations=bytes(len(message.generations)),
        seals=bytes(len(message.seals)),
        host_generations=bytes(len(message.host_generations)),
        host_seals=bytes(len(message.host_seals)),
        disk_generations=bytes(len(message.disk_generations)),
        disk_seals=bytes(len(message.disk_seals)),
        scheduler_epochs=(),
    )


def _survived(state: State, message: Register) -> bool:
    """Whether a pool of before goes on: one that nobody was told is over, and whose generations are below ours."""
    same_era = era_of(minted_by(message.worker_epoch)) == era_of(state.cache_epoch)
    known = not state.may_survive(message.worker_id) or _is_buried(state, message)
    return message.worker_epoch != 0 and same_era and not known


def _on_disk(state: State, said: Register) -> Forest | None:
    """What we know of the blocks that a new epoch finds on its disk; None: it begins an empty pool.

    No voucher is asked for: a block counts where generation and seal are what our own trees, or our log, say. New
    generations have to be above all that are there.
    """
    epoch, forest = said.disk_epoch, None
    if epoch and said.num_disk_blocks and said.disk_generations:
        newest = int(np.frombuffer(said.disk_generations, "<u8").max()) >> COUNTER_BITS
        goes_on = era_of(minted_by(epoch)) == era_of(state.cache_epoch) and newest <= epoch_in_era(state.cache_epoch)
        if goes_on:
            forest = state.aside.take(said.worker_id, epoch)
            forest = forest or state.replay.take(said.worker_id, epoch, Tier.DISK)
    state.dismantling += state.aside.drop(said.worker_id)
    return forest if forest is not None and len(forest.handles) else None


def _owner_of(message: Register, survived: bool, before: Worker | None) -> SchedulerEpoch:
    """Who planned for it, as far as it or we know: it stays so while that session lives."""
    if survived:
        return max(message.scheduler_epochs, default=SchedulerEpoch(0))
    return SchedulerEpoch(0) if before is None else before.owner


def _is_buried(state: State, message: Register) -> bool:
    """Some session was told by an earlier incarnation that this worker epoch is over."""
    dead = DeadWorker(message.worker_id, message.worker_epoch)
    return any(dead in session.dead_workers for session in state.sessions.values())


def acknowledge(state: State, worker_id: WorkerId, ack: FenceAck, now_ns: int) -> None:
    """One that is doubled, unknown or of another worker epoch changes nothing."""
    worker = state.workers.get(worker_id)
    if worker is None or worker.epoch != ack.worker_epoch or ack.fence_id not in worker.fences:
        return
    if worker.phase is Phase.CLOSING and ack.fence_id == worker.window.fence_id:
        _check_arrays(worker.num_blocks, ack.generations, ack.seals)
        _check_epochs(state, ack.generations)
        arrays = (ack.host_generations, ack.host_seals), (ack.disk_generations, ack.disk_seals)
        for tier, (generations, seals) in zip(worker.lower_tiers, arrays, strict=False):
            if generations:
                _check_arrays(tier.store.num_blocks, generations, seals)
                _check_epochs(state, generations)
                tier.store.ledger.load(generations, seals)
        accept_window_ack(state, worker, ack, now_ns)
        return
    finish_fenced(state, worker, worker.fences.pop(ack.fence_id).leases)


def drain(state: State, worker_id: WorkerId, message: Draining) -> None:
    """Schedulers hear of it, and nothing new is granted there. A word of another worker epoch changes nothing."""
    worker = state.workers.get(worker_id)
    if worker is not None and worker.epoch == message.worker_epoch and not worker.draining:
        _take_draining(state, worker, draining=True)


def _take_draining(state: State, worker: Worker, *, draining: bool) -> None:
    """Who waits there would be granted nothing, and asks elsewhere: for what another computes, then it is woken; for
    blocks by right, then it was told when to ask again, and nobody gives any back for it. Workers are shared out anew.
    """
    worker.draining = draining
    state.workers_changed = state.owners_changed = True
    if draining:
        worker.flights.wake_all()
        end_reservations_of_acquires(state, worker)


def _new_worker(state: State, message: Register, epoch: WorkerEpoch, now_ns: int, *, survived: bool) -> Worker:
    ledger = Ledger(message.num_blocks, state.cache_epoch, any_wipes=state.domains.any_wipes, call_time=state.call_time)
    ledger.load(message.generations, message.seals)
    if survived:  # also where it has opened nothing: a plan under a grant of before may be on its way
        ledger.close()
    quotas = Quotas(message.num_blocks, state.domains.listed, POLICIES[state.settings.eviction], ledger.block_time)
    phase = Phase.WINDOW if survived else Phase.OPEN
    worker = Worker(
        message,
        epoch,
        ledger,
        quotas,
        phase=phase,
        now_ns=now_ns,
        woken=state.woken,
        incarnations=state.incarnations,
        events=state.events,
    )
    _add_lower_tiers(state, worker, message)
    deadline_ns = now_ns + state.settings.session_ttl_ms * NS_PER_MS
    worker.window = Window(tuple(sorted(set(message.scheduler_epochs))), deadline_ns)
    return worker


def _add_lower_tiers(state: State, worker: Worker, message: Register) -> None:
    settings = state.settings
    if message.num_host_blocks:
        arrays = message.num_host_blocks, message.host_generations, message.host_seals
        host = _lower_store(state, worker, Tier.HOST, *arrays)
        worker.add_below(LowerTier(host, worker, settings.tiers, down=Direction.DEMOTE, up=Direction.PROMOTE))
        if message.num_disk_blocks:
            arrays = message.num_disk_blocks, message.disk_generations, message.disk_seals
            disk = _lower_store(state, worker, Tier.DISK, *arrays)
            ways, rest_ms = {"down": Direction.STORE, "up": Direction.LOAD}, settings.disk_rest_ms
            worker.add_below(LowerTier(disk, host, settings.disk_costs, **ways, rest_ms=rest_ms))


def _lower_store(
    state: State, worker: Worker, tier: Tier, num_blocks: int, generations: bytes, seals: bytes
) -> BlockStore:
    """What the pool held before is not findable any more; its generations go on. Shares hold there too."""
    ledger = Ledger(num_blocks, state.cache_epoch, any_wipes=False, call_time=state.call_time)
    if generations:
        ledger.load(generations, seals)
    configs = tuple(config.by_shares() for config in state.domains.listed)
    quotas = Quotas(num_blocks, configs, POLICIES[state.settings.eviction], ledger.block_time)
    changes = Changes(worker.worker_id, worker.epoch, state.events, tier)
    return BlockStore(worker.block_size, ledger, quotas, state.incarnations, changes)


def _reconnect(state: State, worker: Worker, message: Register, now_ns: int) -> None:
    """Same epoch, same cache epoch: nothing was lost but messages, so what is unanswered is said again."""
    worker.last_heard_ns = max(worker.last_heard_ns, now_ns)
    if worker.address != message.address:
        worker.address = message.address
        state.workers_changed = True
    if worker.draining != message.draining:
        _take_draining(state, worker, draining=message.draining)
    tell_registered(state, worker)
    for pending in worker.fences.values():
        state.tell_worker(worker.worker_id, pending.message)
    for job in [job for tier in worker.lower_tiers for job in tier.jobs.values()]:
        state.order_copy(worker, job.order)


def _is_explained(worker: Worker, message: Register) -> bool:
    """Whether the reported blocks can follow from the ledger.

    A worker may lag behind a grant that was not attached yet, and behind a seal that is on its way. It is ahead only
    where it has promoted what we do not know to be done. A cached block was written under its generation, so a report
    shows it, unless it was published while the report was on its way. In a closed ledger the second look will tell.
    """
    below = (message.num_host_blocks, message.host_generations), (message.num_disk_blocks, message.disk_generations)
    sizes = [size for size, _ in below if size]
    same_pool = (message.num_blocks, message.block_size) == (worker.num_blocks, worker.block_size)
    same_pool &= sizes == [tier.store.num_blocks for tier in worker.lower_tiers]
    same_pool &= (message.namespace, message.model) == (worker.namespace, worker.model)
    if not same_pool or not worker.is_open:
        return same_pool
    for tier, (_, generations) in zip(worker.lower_tiers, below, strict=False):
        if generations and bool((np.frombuffer(generations, "<u8") > tier.store.ledger.generations).any()):
            return False
    reported = np.frombuffer(message.generations, dtype="<u8")
    ours = worker.ledger.generations
    if bool((reported > ours).any()):
        return False
    cached = worker.ledger.states == BlockState.CACHED
    missing = set(np.flatnonzero(cached & (reported != ours)).tolist())
    if missing - {block for _, handles in worker.published for block in unpack_blocks(handles)}:
        return False
    sealed = np.frombuffer(message.seals, dtype="<u8").reshape(-1, 2)
    expected = worker.ledger.seal_words
    if worker.host is not None:
        expected = expected.copy()
        for job in worker.host.jobs.values():
            if job.order.direction is Direction.PROMOTE:
                expected[unpack_blocks(job.order.dst)] = np.frombuffer(job.order.seals, dtype="<u8").reshape(-1, 2)
    differs = (sealed != expected).any(axis=1) & sealed.any(axis=1) & (reported == ours)
    return not bool(differs.any())


def _check(state: State, worker_id: WorkerId, message: Register) -> None:
    settings = state.settings
    if message.worker_id != worker_id or not worker_id:
        raise MessageRefused(f"worker {worker_id!r} registers as {message.worker_id!r}")
    if not 0 < message.num_blocks <= settings.blocks_per_worker_max:
        raise MessageRefused(f"num_blocks {message.num_blocks} must lie between 1 and {settings.blocks_per_worker_max}")
    if not 0 < message.block_size <= settings.block_size_max:
        raise MessageRefused(f"block_size {message.block_size} must lie between 1 and {settings.block_size_max}")
    if len(message.scheduler_epochs) > settings.sessions_max:
        raise MessageRefused(f"{len(message.scheduler_epochs)} scheduler epochs; at most {settings.sessions_max}")
    if misfit := state.domains.misfit(message.num_blocks):
        raise MessageRefused(
            f"worker {worker_id!r}: {misfit}; give it more blocks or lower what is guaranteed in blocks"
        )
    names = (message.worker_id, message.address, message.model, message.namespace)
    if any(len(name) > settings.name_bytes_max for name in names):
        raise MessageRefused(f"a name is longer than {settings.name_bytes_max} bytes")
    _check_arrays(message.num_blocks, message.generations, message.seals)
    for name, size, generations, seals in (
        ("num_host_blocks", message.num_host_blocks, message.host_generations, message.host_seals),
        ("num_disk_blocks", message.num_disk_blocks, message.disk_generations, message.disk_seals),
    ):
        if not 0 <= size <= settings.blocks_per_worker_max:
            raise MessageRefused(f"{name} {size} must lie between 0 and {settings.blocks_per_worker_max}")
        if generations or seals:
            _check_arrays(size, generations, seals)
    if message.num_disk_blocks and not message.num_host_blocks:
        raise MessageRefused("a disk tier lies below a host tier, and there is none")


def _check_arrays(num_blocks: int, generations: bytes, seals: bytes) -> None:
    if len(generations) != 8 * num_blocks or len(seals) != SEAL_BYTES * num_blocks:
        raise MessageRefused(
            f"{num_blocks} blocks need {8 * num_blocks} bytes of generations and {SEAL_BYTES * num_blocks} of seals; "
            f"there are {len(generations)} and {len(seals)}"
        )
    if num_blocks and int(np.frombuffer(generations, dtype="<u8").max()) >> 40:
        raise MessageRefused("a generation has more than 40 bits")


def _check_epochs(state: State, generations: bytes) -> None:
    """We have granted nothing there, so a generation of our epoch or a later one is another incarnation's (rule 9).

    The connection ends; the worker registers again, and it is judged there what its voucher proves.
    """
    newest = int(np.frombuffer(generations, dtype="<u8").max()) >> COUNTER_BITS
    if newest >= epoch_in_era(state.cache_epoch):
        raise MessageRefused(f"a generation is of cache epoch {newest}; this is {state.cache_epoch}: register again")
