"""The field's KV events say nothing of what is stored under a salt, and lose nothing by it."""

from __future__ import annotations

from dataclasses import replace

from coppice.ids import DomainId
from coppice.messages.kv_events import BlockRemoved, BlockStored
from coppice.namespaces import digest_salt, with_salt
from coppice_cache.core.base.events import IndexEvent, Stored
from coppice_cache.edge.events.kv_events_view import KvEventsView
from coppice_cache.edge.service.event_hub import EventHub
from tests.fakes.cache.index_trees import FakeTrees, Place

A = DomainId("a")


class Told:
    """Trees, and a reader of what they tell."""

    def __init__(self) -> None:
        hub = EventHub(1)
        hub.subscribe()
        self.trees = FakeTrees(hub)
        self.view = KvEventsView(frozenset({A}), "kv@{worker}@{domain}@{model}", with_tokens=True)
        self.plain = self.trees.place("w0", "a", "m", (1, 2))
        self._seen = hub.position

    def salted(self, user: str) -> Place:
        """The same tokens under a salt."""
        return replace(self.plain, namespace=with_salt(self.plain.namespace, digest_salt(A, user)))

    def changes(self) -> list[IndexEvent]:
        found = self.trees.hub.subscribe().read(self._seen, 0)
        self._seen = self.trees.hub.position
        assert hasattr(found, "events")
        return list(found.events)

    def tell(self, events: list[IndexEvent]) -> list[object]:
        return [told.event for event in events for told in self.view.tell(event)]


def test_what_has_a_salt_is_not_told() -> None:
    told = Told()
    told.trees.store(told.salted("user"))
    told.trees.remove(told.salted("user"))
    assert told.tell(told.changes()) == []
    told.trees.store(told.plain)
    assert [type(event) for event in told.tell(told.changes())] == [BlockStored]
    assert (told.view.num_blocks, told.view.topics) == (2, {"kv@w0@a@m"})


def test_many_salts_leave_nothing_in_the_table() -> None:
    told = Told()
    for number in range(4):  # eight blocks, two for each
        told.trees.store(told.salted(f"user {number}"))
        changes = told.changes()
        assert changes
        assert told.tell(changes) == []
    assert all(not worker.groups and not worker.numbers for worker in told.view._workers.values())


def test_a_block_that_went_to_a_salt_is_taken_from_the_readers() -> None:
    """In a snapshot that is read meanwhile a block may still stand as what it was before."""
    told = Told()
    told.trees.store(told.plain)
    (stored,) = told.changes()
    assert isinstance(stored, Stored)
    told.tell([stored])
    granted_again = (int.from_bytes(stored.handles[:8], "little") + (1 << 24)).to_bytes(8, "little")
    later = replace(stored, namespace=told.salted("user").namespace, handles=granted_again + stored.handles[8:])
    assert [type(event) for event in told.tell([later])] == [BlockRemoved]
    assert told.view.num_blocks == 1
