"""The recovery log of the simulated cache service: written behind the core, and in a sorry state after a crash.

What stands in it when the service dies is what a new one gets: all of it, all but a tail that was still on its way,
nothing, or worse: records that are stale or made up, which the checksums of the real log would not let through. None
of that may show in anything that is granted.
"""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

from coppice.handles import BLOCK_BITS
from coppice.ids import DomainId, WorkerId
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed
from coppice_cache.core.index import IndexCore
from coppice_cache.core.inspection.snapshots import Cursor
from coppice_cache.core.state.replay import ReplayCounts
from coppice_sim.base.environment import Environment

SLICE_BLOCKS = 3
EVENTS_MAX = 400  # then a fresh snapshot is begun


class SimLog:
    """One for the world: it survives the services."""

    def __init__(self, env: Environment, domains: tuple[str, ...]) -> None:
        self._sometimes = env.record.sometimes
        self._domains = domains
        self._rng = Random(env.seed ^ 0x10C)  # of its own: what becomes of the log changes nothing else
        self.events: list[IndexEvent] = []
        self._next: list[IndexEvent] = []  # the snapshot that is being written
        self._cursor: Cursor | None = None
        self._is_whole = False
        self._counted = ReplayCounts()

    def follow(self, core: IndexCore) -> None:
        """After each event: take what happened, and go on with a snapshot that is not whole yet."""
        told = core.take_events()
        self._count(core.replay_counts)
        if core.is_replaying:
            return
        if self._is_whole:
            self.events += told
            self._is_whole = len(self.events) < EVENTS_MAX
            self._next, self._cursor = [], None
            return
        part, self._cursor = core.snapshot_slice(self._cursor, SLICE_BLOCKS)
        self._next += [*told, *part]
        if self._cursor is None:
            self.events, self._next, self._is_whole = self._next, [], True

    def start_over(self) -> None:
        """The trees of a worker came back, or another core is there: what was written of them does not go on."""
        self._next, self._cursor, self._is_whole = [], None, False

    def load_into(self, core: IndexCore) -> None:
        """What a new service finds."""
        self.start_over()
        self._counted = ReplayCounts()
        self.events = self._after_a_crash()
        by_worker: dict[WorkerId, list[IndexEvent]] = {}
        for event in self.events:
            by_worker.setdefault(event.worker_id, []).append(event)
        core.load_replay(by_worker)

    def _after_a_crash(self) -> list[IndexEvent]:
        roll, rng, found = self._rng.random(), self._rng, self.events
        if roll < 0.1:
            self._sometimes["log lost"] += bool(found)
            return []
        if roll < 0.4:
            self._sometimes["tail of the log lost"] += bool(found)
            return found[: len(found) - rng.randrange(min(12, len(found)) + 1)]
        if roll < 0.6:
            self._sometimes["log made up"] += bool(found)
            return [made_up for event in found for made_up in self._made_up(event)]
        return found

    def _made_up(self, event: IndexEvent) -> list[IndexEvent]:
        """Now and then a record that is older than it should be, or wrong."""
        rng = self._rng
        if rng.random() < 0.8 or isinstance(event, Cleared):
            return [event]
        if isinstance(event, Removed):
            return []  # what was evicted is still there, if one believes it
        other = rng.choice(self._domains)
        flipped = bytes([event.seals[0] ^ 1]) + event.seals[1:]
        older = b"".join(
            (handle - (1 << BLOCK_BITS)).to_bytes(8, "little")
            for handle in memoryview(event.handles).cast("Q").tolist()
        )
        return [
            rng.choice(
                (
                    event,
                    replace(event, handles=older),
                    replace(event, seals=flipped),
                    replace(event, tokens=event.tokens[:-4] + event.tokens[:4]),
                    replace(event, domain=DomainId(other)),
                    replace(event, parent_seal=b"" if event.parent_seal else flipped[:16]),
                )
            )
        ]

    def _count(self, counts: ReplayCounts) -> None:
        if counts == self._counted:
            return
        for name in (field.name for field in fields(counts)):
            self._sometimes[f"log: {name}"] += getattr(counts, name) - getattr(self._counted, name)
        self._counted = replace(counts)
