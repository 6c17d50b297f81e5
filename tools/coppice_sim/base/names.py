"""Names that every part of a simulated world uses. A worker's address is its name."""

from __future__ import annotations

from coppice.ids import Namespace

CACHE_FOR_SCHEDULERS, CACHE_FOR_WORKERS = "cache for schedulers", "cache for workers"  # addresses
LIAR = "liar"  # see `Liar`
NAMESPACE = Namespace(b"honest model")
