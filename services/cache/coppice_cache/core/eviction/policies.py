"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.policy import EvictionPolicy, LruPolicy

POLICIES: Mapping[Eviction, Callable[[], EvictionPolicy]] = MappingProxyType(
    {Eviction.ADAPTIVE: AdaptivePolicy, Eviction.LRU: LruPolicy}
)
