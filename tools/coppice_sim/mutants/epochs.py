"""What keeps epochs and leases of before a restart apart, taken away; see `registry`."""

from __future__ import annotations

from typing import Any

from coppice_cache.core.recovery import reattach
from coppice_scheduler.core.state.leases import LeaseTable

Patches = list[tuple[Any, str, Any]]


def dead_epochs_forgotten() -> Patches:
    return [(reattach, "_bury", lambda *_: None)]


def lost_leases_forgotten() -> Patches:
    return [(LeaseTable, "lost", lambda self, lease: None)]
