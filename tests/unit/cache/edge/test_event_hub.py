"""The hub: order, exact resume, overruns; and snapshots read while the trees change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Cleared, IndexEvent, Stored, Tier
from coppice_cache.edge.events.following import Began, Changes, Ended, Part, Still, follow
from coppice_cache.edge.service.event_hub import READ_MAX, Batch, EventHub, HubClosed, Overrun, Position
from tests.fakes.cache.index_trees import FakeTrees, PlainConsumer

WAIT_S = 60.0


def event(number: int, size: int = 0) -> IndexEvent:
    """One whose number can be read again."""
    if not size:
        return Cleared(WorkerId("w"), WorkerEpoch(number))
    return Stored(WorkerId("w"), WorkerEpoch(number), DomainId("d"), Namespace(b"n"), b"", bytes(size), b"", b"")


def numbers(batch: Batch | Overrun) -> list[int]:
    assert isinstance(batch, Batch)
    return [int(found.worker_epoch) for found in batch.events]


def publish(hub: EventHub, first: int, last: int, size: int = 0) -> None:
    for number in range(first, last + 1):
        hub.publish([event(number, size)])


def test_events_come_in_order_and_from_the_position_on() -> None:
    hub = EventHub(7)
    reader = hub.subscribe()
    publish(hub, 1, 5)
    hub.publish([event(6), event(7)])
    assert hub.position == Position(7, 7)
    found = reader.read(Position(7, 0), 0)
    assert numbers(found) == [1, 2, 3, 4, 5, 6, 7]
    assert isinstance(found, Batch)
    assert found.position == Position(7, 7)
    assert numbers(reader.read(Position(7, 5), 0)) == [6, 7]
    assert reader.read(Position(7, 7), 0) == Batch(Position(7, 7), ())


def test_a_long_gap_is_read_in_batches() -> None:
    hub = EventHub(1)
    reader = hub.subscribe()
    publish(hub, 1, READ_MAX + 3)
    first = reader.read(Position(1, 0), 0)
    assert isinstance(first, Batch)
    assert first.position == Position(1, READ_MAX)
    assert numbers(reader.read(first.position, 0)) == [READ_MAX + 1, READ_MAX + 2, READ_MAX + 3]


def test_what_was_before_the_first_subscriber_is_not_kept_and_not_missed() -> None:
    hub = EventHub(1)
    publish(hub, 1, 3)
    assert hub.position == Position(1, 3)
    reader = hub.subscribe()
    assert reader.read(Position(1, 2), 0) == Overrun()
    publish(hub, 4, 4)
    assert numbers(reader.read(Position(1, 3), 0)) == [4]


def test_the_ring_is_bounded_by_events() -> None:
    hub = EventHub(1, events_max=4)
    reader = hub.subscribe()
    publish(hub, 1, 9)
    assert reader.read(Position(1, 4), 0) == Overrun()
    assert numbers(reader.read(Position(1, 5), 0)) == [6, 7, 8, 9]


def test_the_ring_is_bounded_by_bytes() -> None:
    hub = EventHub(1, bytes_max=4_000)
    reader = hub.subscribe()
    publish(hub, 1, 9, size=1_000)
    assert reader.read(Position(1, 5), 0) == Overrun()
    assert numbers(reader.read(Position(1, 6), 0)) == [7, 8, 9]
    publish(hub, 10, 10, size=50_000)
    assert numbers(reader.read(Position(1, 9), 0)) == [10], "the last one is kept, whatever its size"
    publish(hub, 11, 13, size=1_000)
    assert numbers(reader.read(Position(1, 10), 0)) == [11, 12, 13], "what was forgotten does not count any more"


@pytest.mark.parametrize("position", [Position(2, 1), Position(1, 4)], ids=["another stream", "from the future"])
def test_a_foreign_position_is_an_overrun(position: Position) -> None:
    hub = EventHub(1)
    reader = hub.subscribe()
    publish(hub, 1, 3)
    assert reader.read(position, 0) == Overrun()


def test_a_restart_voids_every_position() -> None:
    hub = EventHub(1)
    reader = hub.subscribe()
    publish(hub, 1, 3)
    hub.restart(2)
    assert reader.read(Position(1, 3), 0) == Overrun()
    assert hub.position == Position(2, 0)
    publish(hub, 4, 4)
    assert numbers(reader.read(Position(2, 0), 0)) == [4]


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the answer, or what it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(WAIT_S)
        assert found, "it still waits"
        return found[0]

    return join


def waits(reader: Any) -> None:
    deadline = threading.Event()
    while not reader.is_waiting:
        deadline.wait(0.001)


def test_a_waiting_reader_is_woken_by_an_event() -> None:
    hub = EventHub(1)
    reader = hub.subscribe()
    join = in_thread(lambda: reader.read(Position(1, 0), WAIT_S))
    waits(reader)
    publish(hub, 1, 1)
    assert numbers(join()) == [1]


def test_a_waiting_reader_is_woken_by_a_restart_and_by_the_end() -> None:
    hub = EventHub(1)
    reader = hub.subscribe()
    join = in_thread(lambda: reader.read(Position(1, 0), WAIT_S))
    waits(reader)
    hub.restart(2)
    assert join() == Overrun()
    join = in_thread(lambda: reader.read(Position(2, 0), WAIT_S))
    waits(reader)
    hub.close()
    assert isinstance(join(), HubClosed)


def test_a_reader_that_left_is_not_woken() -> None:
    hub = EventHub(1)
    reader, other = hub.subscribe(), hub.subscribe()
    reader.close()
    reader.is_waiting = True
    publish(hub, 1, 1)
    assert reader.is_waiting
    assert numbers(other.read(Position(1, 0), 0)) == [1]


def test_readers_beside_a_fast_writer_see_every_event_or_an_overrun() -> None:
    """The writer laps the readers all the time; nobody may see a wrong event under a number."""
    hub = EventHub(1, events_max=64)
    total = 30_000

    def read_all() -> int:
        reader, position, seen = hub.subscribe(), hub.position, 0
        while position.sequence < total:
            found = reader.read(position, 0.01)
            if isinstance(found, Overrun):
                position = hub.position
                continue
            assert numbers(found) == list(range(position.sequence + 1, found.position.sequence + 1))
            seen += len(found.events)
            position = found.position
        return seen

    joins = [in_thread(read_all) for _ in range(3)]
    publish(hub, 1, total)
    assert all(isinstance(join(), int) for join in joins)


# ---- following ----


def test_following_starts_with_a_snapshot_and_starts_over_after_an_overrun() -> None:
    hub = EventHub(9, events_max=2)
    trees = FakeTrees(hub)
    trees.store(trees.place("w0", "a", "m", (1, 2, 3)))
    steps = follow(hub, trees, hub.subscribe(), None, 0.0)
    whole = list(islice(steps, 4))
    assert [type(step) for step in whole] == [Began, Part, Part, Ended]
    assert whole[-1] == Ended(Position(9, 1))
    assert next(steps) == Still(Position(9, 1))
    trees.remove(trees.place("w0", "a", "m", (1, 2, 3)))
    changes = next(steps)
    assert isinstance(changes, Changes)
    assert (changes.first_sequence, changes.position) == (2, Position(9, 2))
    publish(hub, 1, 3)
    assert [type(step) for step in islice(steps, 3)] == [Began, Part, Ended]


def test_following_resumes_without_a_snapshot() -> None:
    hub = EventHub(9)
    trees = FakeTrees(hub)
    reader = hub.subscribe()
    trees.store(trees.place("w0", "a", "m", (1,)))
    trees.store(trees.place("w0", "a", "m", (2,)))
    step = next(follow(hub, trees, reader, Position(9, 1), 0.0))
    assert isinstance(step, Changes)
    assert (step.first_sequence, len(step.events)) == (2, 1)
    assert isinstance(next(follow(hub, trees, reader, Position(8, 1), 0.0)), Began)


WORKERS, DOMAINS, MODELS = ("w0", "w1"), ("a", "b"), ("m", "n")
CHAINS = st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple)
CHANGES = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from(WORKERS),
        st.sampled_from(DOMAINS),
        st.sampled_from(MODELS),
        CHAINS,
        st.sampled_from(Tier),
    ),
    st.tuples(
        st.just("remove"),
        st.sampled_from(WORKERS),
        st.sampled_from(DOMAINS),
        st.sampled_from(MODELS),
        CHAINS,
        st.sampled_from(Tier),
    ),
    st.tuples(st.just("clear"), st.sampled_from(("", *DOMAINS)), st.sampled_from(("", *MODELS))),
    st.just(("reclaim",)),
    st.tuples(st.just("end_worker"), st.sampled_from(WORKERS)),
)

CHANGES_WITH_CUTS = st.one_of(
    CHANGES,
    st.tuples(
        st.just("cut"),
        st.sampled_from(WORKERS),
        st.sampled_from(DOMAINS),
        st.sampled_from(MODELS),
        CHAINS,
        st.sampled_from(Tier),
    ),
)


def change(trees: FakeTrees, what: tuple[Any, ...]) -> None:
    kind, *arguments = what
    if kind in ("store", "remove", "cut"):
        getattr(trees, kind)(trees.place(*arguments))
    else:
        getattr(trees, kind)(*arguments)


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(CHANGES_WITH_CUTS, max_size=12),
    between=st.lists(st.lists(CHANGES_WITH_CUTS, max_size=4), max_size=12),
    after=st.lists(CHANGES_WITH_CUTS, max_size=8),
    slice_blocks=st.integers(1, 3),
    events_max=st.sampled_from((4, 64)),
)
def test_a_fuzzy_snapshot_and_its_changes_come_to_what_is_in_the_trees(
    before: list[Any], between: list[list[Any]], after: list[Any], slice_blocks: int, events_max: int
) -> None:
    hub = EventHub(1, events_max=events_max)
    trees = FakeTrees(hub, slice_blocks)
    reader = hub.subscribe()
    for what in before:
        change(trees, what)
    rounds = iter(between)
    trees.between = lambda: [change(trees, what) for what in next(rounds, [])] and None
    consumer = PlainConsumer()
    later = iter(after)
    for step in follow(hub, trees, reader, None, 0.0):
        match step:
            case Began():
                consumer.begin()
            case Part(_, stored):
                for one in stored:
                    consumer.apply(one)
            case Changes(_, events):
                for one in events:
                    consumer.apply(one)
            case Still():
                assert consumer.blocks == trees.findable()
                what = next(later, None)
                if what is None:
                    break
                change(trees, what)
