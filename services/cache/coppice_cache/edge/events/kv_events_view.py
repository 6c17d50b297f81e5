"""What the readers of the field's KV events have been told, and how a change of the trees is said to them.

Their blocks have names (hashes) where ours have handles; a block's name is the first 8 bytes of its seal. That is one
occupancy's name only as long as it is findable: after an invalidation the same tokens can be stored again, under the
same name, before the blocks of the first time are reclaimed. So this keeps, for each block of each pool, the handle and
the name that were said last. A removal of another handle than that one changes nothing for the readers, and a name goes
with the last of the blocks that have it.

The same table lets a part be cleared. `AllBlocksCleared` says that everything is gone, nothing less, and many readers
(Dynamo, for one) look at no topic: for them it is everything of the publisher. So a Cleared of a worker epoch, a domain
or a namespace becomes AllBlocksCleared where the publisher has nothing else left, and a list of removals where it has:
another domain, another revision of the model, another worker on the same endpoint.

    block id    0       1       2          numpy, 20 bytes for each block of a pool that has a published domain
    handles   | h0    | 0     | h2    |    0: nothing was said of it
    names     | n0    |       | n2    |
    groups    | 0     |       | 1     |    which (domain, namespace)

and a set of the names in each pool, some 80 bytes for each.

What is stored under a salt is not told: readers know salts as clients send them, which is not known here, and would
take its blocks for those that every prompt finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coppice.handles import block_ids, handles_array
from coppice.ids import TOKEN_BYTES, DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from coppice.namespaces import decode_namespace, salt_of
from coppice.seals import SEAL_BYTES
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier

NAME_BYTES = 8
EVENT_BLOCKS_MAX = 1_024  # in one event; a longer run is said in several
MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
TOPIC_FIELDS = ("worker", "domain", "model")

UInt64 = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Told:
    """One event for the readers of one topic."""

    topic: str
    event: KvEvent


@dataclass(frozen=True, slots=True)
class _Group:
    domain: DomainId
    namespace: Namespace
    topic: str
    lora_name: str | None


class _Pool:
    """Of one tier of one worker epoch. Arrays grow with the highest block id that was stored."""

    def __init__(self) -> None:
        self.handles: UInt64 = np.zeros(0, dtype=np.uint64)
        self.names: UInt64 = np.zeros(0, dtype=np.uint64)
        self.groups: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._named: set[int] = set()
        self._more: Counter[int] = Counter()  # name -> blocks that have it, besides one; never 0

    def name(self, names: list[int]) -> None:
        """Each of these has got one block more."""
        twice = self._named.intersection(names)
        if twice:
            self._more.update(name for name in names if name in twice)
        self._named.update(names)

    def unname(self, names: list[int]) -> list[int]:
        """Each of these lost a block. Returns those that no block has any more."""
        gone = names
        if self._more:
            gone = []
            for name in names:
                if self._more[name]:
                    self._more[name] -= 1
                else:
                    gone.append(name)
            self._more = +self._more
        self._named.difference_update(gone)
        return gone

    def reach(self, block: int) -> None:
        if block < len(self.handles):
            return
        more = max(block + 1, 2 * len(self.handles)) - len(self.handles)
        self.handles = np.pad(self.handles, (0, more))
        self.names = np.pad(self.names, (0, more))
        self.groups = np.pad(self.groups, (0, more))


@dataclass
class _Worker:
    """One epoch of a worker."""

    pools: dict[Tier, _Pool] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)
    numbers: dict[tuple[DomainId, Namespace], int] = field(default_factory=dict)


class KvEventsView:
    """`domains` are those that readers may know of; what happens in others is not said at all.

    `topic` is a template with the fields of TOPIC_FIELDS. With a `worker`, nothing is said of others.
    """

    def __init__(
        self, domains: frozenset[DomainId], topic: str, *, with_tokens: bool, worker: WorkerId | None = None
    ) -> None:
        self._domains = domains
        self._worker = worker
        self._topic = topic
        self._with_tokens = with_tokens
        self._workers: dict[tuple[WorkerId, WorkerEpoch], _Worker] = {}
        self._blocks: Counter[str] = Counter()  # topic -> blocks that its readers know of; never 0

    @property
    def topics(self) -> frozenset[str]:
        """Those on which somebody may have a block now."""
        return frozenset(self._blocks)

    @property
    def num_blocks(self) -> int:
        return self._blocks.total()

    def forget(self) -> None:
        """As if nothing had been said: the readers are told to forget, too."""
        self._workers.clear()
        self._blocks.clear()

    def tell(self, event: IndexEvent) -> list[Told]:
        """What the readers hear of it, in order. Nothing for what they know already, or must not know."""
        if self._worker not in (None, event.worker_id):
            return []
        if isinstance(event, Cleared):
            return list(self._clear(event))
        if event.domain not in self._domains or not event.handles:
            return []
        return list(self._store(event) if isinstance(event, Stored) else self._remove(event))

    # ---- the three kinds ----

    def _store(self, event: Stored) -> Iterator[Told]:
        worker = self._workers.setdefault((event.worker_id, event.worker_epoch), _Worker())
        pool = worker.pools.setdefault(event.tier, _Pool())
        handles, names = handles_array(event.handles), _names(event.seals)
        ids = block_ids(event.handles).astype(np.intp)
        pool.reach(int(ids.max()))
        known = pool.handles[ids]
        # A block holds one thing at a time. In a snapshot that was read meanwhile an older one may still stand here.
        displaced = ids[(known != 0) & (known != handles)]
        if len(displaced):
            yield from self._take(worker, event.tier, displaced)
        if salt_of(event.namespace):
            return
        number = self._number(worker, event)
        group = worker.groups[number]
        fresh = pool.handles[ids] == 0
        self._blocks[group.topic] += int(np.count_nonzero(fresh))
        pool.name(names[fresh].tolist())
        pool.handles[ids], pool.names[ids], pool.groups[ids] = handles, names, number
        yield from self._said(group, event, names)

    def _said(self, group: _Group, event: Stored, names: UInt64) -> Iterator[Told]:
        block_bytes = len(event.tokens) // len(names)
        parent = int(_names(event.parent_seal)[0]) if event.parent_seal else None
        for start in range(0, len(names), EVENT_BLOCKS_MAX):
            run = names[start : start + EVENT_BLOCKS_MAX].tolist()
            tokens = event.tokens[start * block_bytes : (start + len(run)) * block_bytes] if self._with_tokens else b""
            stored = BlockStored(
                block_hashes=tuple(run),
                parent_block_hash=parent,
                tokens=tokens,
                block_size=block_bytes // TOKEN_BYTES,
                medium=MEDIUM[event.tier],
                lora_name=group.lora_name,
            )
            yield Told(group.topic, stored)
            parent = run[-1]

    def _remove(self, event: Removed) -> Iterator[Told]:
        worker = self._workers.get((event.worker_id, event.worker_epoch))
        pool = worker.pools.get(event.tier) if worker is not None else None
        if worker is None or pool is None:
            return
        ids = block_ids(event.handles).astype(np.intp)
        handles = handles_array(event.handles)[ids < len(pool.handles)]
        ids = ids[ids < len(pool.handles)]
        yield from self._take(worker, event.tier, ids[pool.handles[ids] == handles])

    def _clear(self, event: Cleared) -> Iterator[Told]:
        worker = self._workers.get((event.worker_id, event.worker_epoch))
        if worker is None:
            return
        numbers = [
            number
            for number, group in enumerate(worker.groups)
            if event.domain in ("", group.domain) and event.namespace in (b"", group.namespace)
        ]
        told: list[Told] = []
        for tier, pool in worker.pools.items():
            gone = np.flatnonzero((pool.handles != 0) & np.isin(pool.groups, np.array(numbers, dtype=np.uint32)))
            told += self._take(worker, tier, gone)
        if not event.domain and not event.namespace:
            del self._workers[event.worker_id, event.worker_epoch]
        if told and not self._blocks:
            told = [Told(topic, AllBlocksCleared()) for topic in dict.fromkeys(one.topic for one in told)]
        yield from told

    # ---- the table ----

    def _take(self, worker: _Worker, tier: Tier, ids: Ids) -> Iterator[Told]:
        """The readers lose these blocks, which all are known."""
        pool = worker.pools[tier]
        groups = pool.groups[ids]
        for number in np.unique(groups).tolist():
            topic = worker.groups[number].topic
            names = pool.names[ids[groups == number]].tolist()
            self._blocks[topic] -= len(names)
            if not self._blocks[topic]:
                del self._blocks[topic]
            gone = pool.unname(names)
            for start in range(0, len(gone), EVENT_BLOCKS_MAX):
                yield Told(topic, BlockRemoved(tuple(gone[start : start + EVENT_BLOCKS_MAX]), MEDIUM[tier]))
        pool.handles[ids] = 0

    def _number(self, worker: _Worker, event: Stored) -> int:
        key = (event.domain, event.namespace)
        number = worker.numbers.get(key)
        if number is None:
            number = worker.numbers[key] = len(worker.groups)
            model, lora_name = _model_of(event.namespace)
            topic = self._topic.format(worker=event.worker_id, domain=event.domain, model=model)
            worker.groups.append(_Group(event.domain, event.namespace, topic, lora_name))
        return number


def _names(seals: bytes) -> UInt64:
    """The first 8 bytes of each seal as little-endian u64, shape [N]. Seals are keyed digests: they tell nothing."""
    pairs: UInt64 = np.frombuffer(seals, dtype="<u8").reshape(-1, SEAL_BYTES // NAME_BYTES)
    return pairs[:, 0]


def _model_of(namespace: Namespace) -> tuple[str, str | None]:
    """Model and adapter, for people and routers. A namespace of a client's own making is shown in hexadecimal."""
    try:
        fields = decode_namespace(namespace)
    except ValueError:
        return namespace.hex()[:64], None
    return fields.model, fields.adapter or None
