"""Invalidation in O(1): a tree carries the stamp under which it was made, and is found only while that is current.

    stamp(domain, namespace) = how often all, this domain, this namespace, or this very pair was invalidated

What is said of a namespace holds for all its salts, so a salted one has the counts of both. All counts only grow, so
equal sums mean that nothing was invalidated in between.
"""

from __future__ import annotations

from collections import Counter

from coppice.ids import DomainId, Namespace
from coppice.namespaces import without_salt


class Incarnations:
    """Shared by all workers. `version` changes with every invalidation."""

    def __init__(self) -> None:
        self.version = 0
        self._all = 0
        self._domains: Counter[DomainId] = Counter()
        self._namespaces: Counter[Namespace] = Counter()
        self._pairs: Counter[tuple[DomainId, Namespace]] = Counter()

    def stamp(self, domain: DomainId, namespace: Namespace) -> int:
        if not self.version:
            return 0
        whole = without_salt(namespace)
        stamp = self._all + self._domains[domain] + self._counted(domain, namespace)
        return stamp if whole == namespace else stamp + self._counted(domain, whole)

    def _counted(self, domain: DomainId, namespace: Namespace) -> int:
        return self._namespaces[namespace] + self._pairs[domain, namespace]

    def invalidate(self, domain: DomainId | None, namespace: Namespace | None) -> None:
        """None stands for every domain, or every namespace."""
        self.version += 1
        if domain is not None and namespace is not None:
            self._pairs[domain, namespace] += 1
        elif domain is not None:
            self._domains[domain] += 1
        elif namespace is not None:
            self._namespaces[namespace] += 1
        else:
            self._all += 1
