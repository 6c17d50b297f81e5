"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from coppice_cache.core.adaptive import AdaptivePolicy
from coppice_cache.core.eviction import EvictionPolicy, LruPolicy
from coppice_cache.core.settings import Eviction

POLICIES: Mapping[Eviction, Callable[[], EvictionPolicy]] = MappingProxyType(
    {Eviction.ADAPTIVE: AdaptivePolicy, Eviction.LRU: LruPolicy}
)
