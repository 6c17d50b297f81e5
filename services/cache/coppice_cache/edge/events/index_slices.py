"""What is findable, read from the core a slice at a time. A follower's source of snapshots."""

from __future__ import annotations

from typing import cast

from coppice_cache.core.inspection.snapshots import Cursor
from coppice_cache.edge.events.following import SnapshotSlice
from coppice_cache.edge.service.service import IndexService

SLICE_BLOCKS = 256  # in one hold of the service's lock: below a millisecond, with one block to a node


class IndexSlices:
    def __init__(self, service: IndexService) -> None:
        self._service = service

    def next_slice(self, cursor: object | None) -> SnapshotSlice:
        """Raises CoreBroken. A cursor of an incarnation that is over finds nothing more."""
        with self._service.entered() as core:
            events, next_cursor = core.snapshot_slice(cast("Cursor | None", cursor), SLICE_BLOCKS)
        return SnapshotSlice(tuple(events), next_cursor)
