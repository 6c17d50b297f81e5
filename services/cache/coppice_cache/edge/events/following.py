"""All findable blocks, then every change: how a follower of the trees comes to the same blocks as the trees.

    Began | Part Part Part | Ended(position) | Changes Changes Still Changes ...      and Began again after an overrun
            `-- slices --'

A snapshot is read in slices, each under one hold of the service's lock, and the trees change in between. So it is
fuzzy: a block that came or went meanwhile may be in it or not. The changes that follow start at the position where the
stream was *before* the first slice. Whatever happened to a block since then is among them, in order, and a handle names
one occupancy of a block; so after the changes up to the end of the snapshot every block is where its last change put
it, and a block without a change was seen by the slices as it is.

A source owes this for it: what is findable from the first slice to the last stands in at least one of them, and a run
never comes before the run that it continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from coppice_cache.core.base.events import IndexEvent, Stored
from coppice_cache.edge.service.event_hub import EventHub, Overrun, Position, Subscription

STILL_S = 10.0  # how often a follower hears that nothing happened


@dataclass(frozen=True, slots=True)
class SnapshotSlice:
    """Part of what is findable. `cursor` is where the next slice goes on; None after the last one."""

    events: tuple[Stored, ...]
    cursor: object | None


class SnapshotSource(Protocol):
    """All findable blocks, a few milliseconds' worth at a time.

    A cursor belongs to the incarnation that gave it; with one of another, the answer is a slice without a next one.
    """

    def next_slice(self, cursor: object | None) -> SnapshotSlice:
        """The first slice for None. Takes the service's lock once."""


@dataclass(frozen=True, slots=True)
class Began:
    """Forget everything: the whole follows."""

    stream: int


@dataclass(frozen=True, slots=True)
class Part:
    stream: int
    events: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The changes after `position` follow. From here on a follower can resume."""

    position: Position


@dataclass(frozen=True, slots=True)
class Changes:
    """`position` is that of the last of them."""

    position: Position
    events: tuple[IndexEvent, ...]

    @property
    def first_sequence(self) -> int:
        return self.position.sequence - len(self.events) + 1


@dataclass(frozen=True, slots=True)
class Still:
    """Nothing happened for a while."""

    position: Position


Step = Began | Part | Ended | Changes | Still


def follow(
    hub: EventHub,
    source: SnapshotSource,
    subscription: Subscription,
    resume: Position | None,
    still_s: float = STILL_S,
) -> Iterator[Step]:
    """Endless. A snapshot unless the changes after `resume` are still kept. Raises HubClosed from the iteration."""
    position = resume
    while True:
        if position is None:
            began = hub.position
            yield Began(began.stream)
            for events in slices(source):
                yield Part(began.stream, events)
            yield Ended(began)
            position = began
        found = subscription.read(position, still_s)
        if isinstance(found, Overrun):
            position = None
            continue
        position = found.position
        yield Changes(position, found.events) if found.events else Still(position)


def slices(source: SnapshotSource) -> Iterator[tuple[Stored, ...]]:
    """What is findable, as it is when each slice is read."""
    cursor: object | None = None
    while True:
        part = source.next_slice(cursor)
        if part.events:
            yield part.events
        if part.cursor is None:
            return
        cursor = part.cursor
