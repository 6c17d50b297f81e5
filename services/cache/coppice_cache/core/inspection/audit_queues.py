"""I11, the part of an audit that asks whether every leaf without pins can be evicted: its policy must hold it.

A leaf that is not held when the walk comes by is a suspect: something above it may have been cut off. Suspects are few,
and are asked about once more when the walk is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from coppice.ids import DomainId
from coppice_cache.core.inspection.check import require
from coppice_cache.core.pool.quotas import DomainUse
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node, is_cut_off

_SUSPECTS_PER_STEP = 256


class Queues:
    """The queues of all domains of one store."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._suspects: dict[str, list[Node]] = {}

    def ask(self, domain: str, leaf: Node) -> None:
        """A leaf that can be evicted at this moment, unless something above it was cut off."""
        use = self._store.quotas.uses.get(DomainId(domain))
        if use is None or not use.queue.holds(leaf):
            self._suspects.setdefault(domain, []).append(leaf)

    def confirm(self, use: DomainUse) -> Iterator[None]:
        suspects = self._suspects.pop(use.config.domain, [])
        while suspects:
            part = suspects[-_SUSPECTS_PER_STEP:]
            del suspects[-_SUSPECTS_PER_STEP:]
            missing = [
                leaf for leaf in part if leaf.is_evictable and not use.queue.holds(leaf) and not is_cut_off(leaf)
            ]
            require(not missing, "I11", f"{len(missing)} leaves of {use.config.domain!r} cannot be evicted")
            yield
