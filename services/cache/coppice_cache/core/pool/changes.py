"""How a store tells what enters and leaves its trees. The events wait in the core's list until they are taken."""

from __future__ import annotations

from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.core.radix.tree import Tree


class Changes:
    """Of one tier of one worker epoch. `events` is None where nobody listens; then nothing is built."""

    __slots__ = ("_events", "_tier", "_worker_epoch", "_worker_id", "are_told")

    def __init__(
        self, worker_id: WorkerId, worker_epoch: WorkerEpoch, events: list[IndexEvent] | None, tier: Tier = Tier.DEVICE
    ) -> None:
        self._worker_id = worker_id
        self._worker_epoch = worker_epoch
        self._events = events
        self._tier = tier
        self.are_told = events is not None

    def stored(self, tree: Tree, parent_seal: bytes, tokens: bytes, handles: bytes, seals: bytes) -> None:
        """`parent_seal` is empty at a root."""
        if self._events is not None:
            self._events.append(self.as_stored(tree, parent_seal, tokens, handles, seals))

    def removed(self, domain: DomainId, namespace: Namespace, handles: bytes, seals: bytes, *, all_below: bool) -> None:
        if self._events is not None:
            where = (self._worker_id, self._worker_epoch, domain, namespace)
            self._events.append(Removed(*where, handles, seals, self._tier, all_below))

    def cleared(self, domain: DomainId | None = None, namespace: Namespace | None = None) -> None:
        """None stands for every domain, or every namespace."""
        if self._events is not None:
            named = (domain or DomainId(""), namespace or Namespace(b""))
            self._events.append(Cleared(self._worker_id, self._worker_epoch, *named))

    def as_stored(self, tree: Tree, parent_seal: bytes, tokens: bytes, handles: bytes, seals: bytes) -> Stored:
        where = (self._worker_id, self._worker_epoch, tree.domain, tree.namespace)
        return Stored(*where, parent_seal, tokens, handles, seals, self._tier, tree.chain_key)
