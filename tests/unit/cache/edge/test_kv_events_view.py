"""What the field's routers are told: names instead of handles, one topic per worker, never of a foreign domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.edge.kv_events.payloads import decode_batch, encode_batch
from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from coppice.namespaces import NamespaceFields, encode_namespace
from coppice_cache.core.base.events import Cleared, Removed, Stored, Tier
from coppice_cache.edge.events.following import Began, Changes, Part, Still, follow, slices
from coppice_cache.edge.events.kv_events_out import MESSAGE_BYTES, messages_of
from coppice_cache.edge.events.kv_events_view import EVENT_BLOCKS_MAX, MEDIUM, KvEventsView, Told
from coppice_cache.edge.service.event_hub import EventHub
from tests.fakes.cache.index_trees import BLOCK_BYTES, BLOCK_TOKENS, FakeTrees, Place, namespace_of, seal_of
from tests.unit.cache.edge.test_event_hub import CHANGES, change
from tests.unit.cache.name_reader import NameReader

TOPIC = "kv@{worker}@{model}"
A = DomainId("a")


def view(*domains: str, topic: str = TOPIC, with_tokens: bool = False) -> KvEventsView:
    return KvEventsView(frozenset(map(DomainId, domains or ("a",))), topic, with_tokens=with_tokens)


def name_of(at: Place) -> int:
    return int.from_bytes(seal_of(at)[:8], "little")


def stored(trees: FakeTrees, hub: EventHub, at: Place) -> list[Any]:
    """The events of one change."""
    before = hub.position
    trees.store(at)
    found = hub.subscribe().read(before, 0)
    assert hasattr(found, "events")
    return list(found.events)


def world() -> tuple[EventHub, FakeTrees]:
    hub = EventHub(1)
    hub.subscribe()
    return hub, FakeTrees(hub)


def test_a_run_is_said_with_names_that_are_seals() -> None:
    hub, trees = world()
    at = trees.place("w0", "a", "m", (1, 2))
    deeper = replace(at, chain=(1, 2, 1))
    one, two = stored(trees, hub, at)[0], stored(trees, hub, deeper)[0]
    told = view().tell(one) + view().tell(two)
    assert told[0] == Told(
        "kv@w0@m",
        BlockStored((name_of(replace(at, chain=(1,))), name_of(at)), None, b"", BLOCK_TOKENS, medium="GPU"),
    )
    assert told[1] == Told("kv@w0@m", BlockStored((name_of(deeper),), name_of(at), b"", BLOCK_TOKENS, medium="GPU"))
    assert view(with_tokens=True).tell(one)[0].event.tokens == one.tokens  # type: ignore[union-attr]


def test_the_host_tier_is_the_cpu_and_an_adapter_is_named() -> None:
    namespace = encode_namespace(NamespaceFields("m", "r", "bf16", BLOCK_TOKENS, "rope", "french", "7"))
    event = Stored(
        WorkerId("w"), WorkerEpoch(1), A, namespace, b"", bytes(BLOCK_BYTES), b"\1" * 8, b"\2" * 16, Tier.HOST
    )
    (told,) = view().tell(event)
    assert isinstance(told.event, BlockStored)
    assert (told.topic, told.event.medium, told.event.lora_name) == ("kv@w@m", "CPU", "french")


def test_a_namespace_of_a_clients_own_making_has_a_topic_too() -> None:
    event = Stored(
        WorkerId("w"), WorkerEpoch(1), A, Namespace(b"my model"), b"", bytes(BLOCK_BYTES), b"\1" * 8, b"\2" * 16
    )
    assert view().tell(event)[0].topic == "kv@w@" + b"my model".hex()


def test_nothing_is_said_of_other_domains() -> None:
    hub, trees = world()
    only_b = view("b")
    (event,) = stored(trees, hub, trees.place("w0", "a", "m", (1,)))
    removed = Removed(event.worker_id, event.worker_epoch, A, event.namespace, event.handles, event.seals)
    cleared = Cleared(event.worker_id, event.worker_epoch, A)
    assert [only_b.tell(one) for one in (event, removed, cleared)] == [[], [], []]
    assert only_b.num_blocks == 0


def test_a_removal_of_an_older_occupancy_takes_nothing_away() -> None:
    """Cleared, stored again under the same name, and only then the first one is reclaimed."""
    hub, trees = world()
    at = trees.place("w0", "a", "m", (1,))
    shown = view()
    shown.tell(stored(trees, hub, at)[0])
    before = hub.position
    trees.clear("a")
    trees.store(at)
    trees.reclaim()
    found = hub.subscribe().read(before, 0)
    cleared, again, reclaimed = found.events  # type: ignore[union-attr]
    assert [one.event for one in shown.tell(cleared)] == [AllBlocksCleared()]
    assert [one.event.block_hashes for one in shown.tell(again)] == [(name_of(at),)]  # type: ignore[union-attr]
    assert shown.tell(reclaimed) == []
    assert shown.num_blocks == 1


def test_a_block_that_holds_something_else_now_lost_what_it_held() -> None:
    """A snapshot read meanwhile can show a block twice; the removal in between follows when it means nothing more."""
    first = Stored(WorkerId("w"), WorkerEpoch(1), A, namespace_of("m"), b"", bytes(BLOCK_BYTES), b"\5" * 8, b"\1" * 16)
    second = replace(first, handles=b"\5\5\5\6" * 2, seals=b"\2" * 16)
    shown = view()
    shown.tell(first)
    gone, here = shown.tell(second)
    assert gone.event == BlockRemoved((int.from_bytes(b"\1" * 8, "little"),), "GPU")
    assert isinstance(here.event, BlockStored)
    assert (
        shown.tell(Removed(first.worker_id, first.worker_epoch, A, first.namespace, first.handles, first.seals)) == []
    )
    assert shown.num_blocks == 1


def test_a_name_goes_with_the_last_block_that_has_it() -> None:
    """What hung below a distrusted block is reclaimed late; the same tokens may have been stored again before that."""
    worker, namespace = (WorkerId("w"), WorkerEpoch(1)), namespace_of("m")
    blocks = [bytes([n, 0, 0, 0, 0, 0, 1, 0]) for n in range(4)]
    seals = [bytes([n]) * 16 for n in (7, 8)]
    shown, router = view(), NameReader()

    def tell(*events: Any) -> set[int]:
        for event in events:
            for one in shown.tell(event):
                router.hear(one.topic, one.event)
        return {name for _, _, name in router.has()}

    top, below = (int.from_bytes(seal[:8], "little") for seal in seals)
    tokens = bytes(2 * BLOCK_BYTES)
    tell(Stored(*worker, A, namespace, b"", tokens, blocks[0] + blocks[1], b"".join(seals)))
    tell(Removed(*worker, A, namespace, blocks[0], seals[0]))
    tell(Stored(*worker, A, namespace, b"", tokens, blocks[2] + blocks[3], b"".join(seals)))
    assert tell(Removed(*worker, A, namespace, blocks[1], seals[1])) == {top, below}
    assert tell(Removed(*worker, A, namespace, blocks[3], seals[1])) == {top}
    assert shown.num_blocks == 1


def test_a_part_of_a_topic_is_listed_and_a_whole_one_is_cleared() -> None:
    """Two revisions of a model share a topic: when one of them goes, the other has to stay."""
    hub, trees = world()
    shown = view(topic="kv@{worker}")
    first, second = trees.place("w0", "a", "m", (1, 2)), trees.place("w0", "a", "n", (1,))
    for at in (first, second):
        shown.tell(stored(trees, hub, at)[0])
    epoch = trees.epoch_of("w0")
    (part,) = shown.tell(Cleared(WorkerId("w0"), epoch, A, namespace_of("m")))
    assert isinstance(part.event, BlockRemoved)
    assert set(part.event.block_hashes) == {name_of(first), name_of(replace(first, chain=(1,)))}
    assert shown.tell(Cleared(WorkerId("w0"), epoch)) == [Told("kv@w0", AllBlocksCleared())]
    assert shown.tell(Cleared(WorkerId("w0"), epoch)) == []
    assert shown.topics == frozenset()


def test_nothing_of_other_workers_is_cleared_with_the_end_of_an_epoch() -> None:
    """Not even for readers that look at no topic: while others have blocks, those of the epoch are listed."""
    hub, trees = world()
    shown = view("a", "b", topic="kv@{worker}@{domain}@{model}")
    places = [trees.place(worker, domain, "m", (1,)) for worker, domain in (("w0", "a"), ("w0", "b"), ("w1", "a"))]
    for at in places:
        shown.tell(stored(trees, hub, at)[0])
    told = shown.tell(Cleared(WorkerId("w0"), trees.epoch_of("w0")))
    assert {one.topic: one.event for one in told} == {
        "kv@w0@a@m": BlockRemoved((name_of(places[0]),), "GPU"),
        "kv@w0@b@m": BlockRemoved((name_of(places[1]),), "GPU"),
    }
    assert shown.topics == {"kv@w1@a@m"}
    assert shown.tell(Cleared(WorkerId("w1"), trees.epoch_of("w1"))) == [Told("kv@w1@a@m", AllBlocksCleared())]


def test_a_publisher_of_one_worker_says_nothing_of_others() -> None:
    hub, trees = world()
    shown = KvEventsView(frozenset({A}), TOPIC, with_tokens=False, worker=WorkerId("w1"))
    assert shown.tell(stored(trees, hub, trees.place("w0", "a", "m", (1,)))[0]) == []
    assert shown.tell(Cleared(WorkerId("w0"), trees.epoch_of("w0"))) == []
    assert len(shown.tell(stored(trees, hub, trees.place("w1", "a", "m", (1,)))[0])) == 1


def test_a_long_run_is_said_in_pieces_that_hang_together() -> None:
    count = 2 * EVENT_BLOCKS_MAX + 3
    handles = b"".join((number + (1 << 24)).to_bytes(8, "little") for number in range(count))
    seals = b"".join(number.to_bytes(8, "little") + bytes(8) for number in range(1, count + 1))
    tokens = b"".join(bytes([number % 251]) * BLOCK_BYTES for number in range(count))
    event = Stored(WorkerId("w"), WorkerEpoch(1), A, namespace_of("m"), b"", tokens, handles, seals)
    pieces = [one.event for one in view(with_tokens=True).tell(event)]
    assert [len(piece.block_hashes) for piece in pieces] == [EVENT_BLOCKS_MAX, EVENT_BLOCKS_MAX, 3]  # type: ignore[union-attr]
    assert [piece.parent_block_hash for piece in pieces] == [None, EVENT_BLOCKS_MAX, 2 * EVENT_BLOCKS_MAX]  # type: ignore[union-attr]
    assert b"".join(piece.tokens for piece in pieces) == tokens  # type: ignore[union-attr]
    messages = messages_of([Told("t", piece) for piece in pieces] * 4 + [Told("u", AllBlocksCleared())])
    assert [topic for topic, _ in messages] == ["t"] * (len(messages) - 1) + ["u"]
    assert len(messages) > 2, f"a message ends at {MESSAGE_BYTES} bytes"
    assert [event for topic, events in messages for event in events if topic == "t"] == pieces * 4


# ---- readers end with what is in the trees ----


def expected(trees: FakeTrees, domains: tuple[str, ...]) -> set[tuple[str, str, int]]:
    return {(f"kv@{at.worker_id}", MEDIUM[at.tier], name_of(at)) for at in trees.blocks if at.domain in domains}


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(CHANGES, max_size=12),
    between=st.lists(st.lists(CHANGES, max_size=4), max_size=12),
    after=st.lists(CHANGES, max_size=8),
)
def test_a_reader_of_one_worker_needs_no_topics(before: list[Any], between: list[list[Any]], after: list[Any]) -> None:
    hub = EventHub(1)
    trees = FakeTrees(hub)
    reader = hub.subscribe()
    for what in before:
        change(trees, what)
    rounds = iter(between)
    trees.between = lambda: [change(trees, what) for what in next(rounds, [])] and None
    shown = KvEventsView(
        frozenset({A, DomainId("b")}), "{worker}@{domain}@{model}", with_tokens=False, worker=WorkerId("w0")
    )
    router, later = NameReader(), iter(after)
    for step in follow(hub, trees, reader, None, 0.0):
        match step:
            case Part(_, events) | Changes(_, events):
                for event in events:
                    for one in shown.tell(event):
                        router.hear("", one.event)
            case Still():
                found = {(medium, name) for _, medium, name in router.has()}
                assert found == {where[1:] for where in expected(trees, ("a", "b")) if where[0] == "kv@w0"}
                what = next(later, None)
                if what is None:
                    break
                change(trees, what)


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(CHANGES, max_size=12),
    between=st.lists(st.lists(CHANGES, max_size=4), max_size=12),
    after=st.lists(CHANGES, max_size=8),
    domains=st.sampled_from([("a",), ("a", "b")]),
    refresh=st.integers(0, 6),
)
def test_readers_of_names_come_to_what_is_in_the_trees(
    before: list[Any], between: list[list[Any]], after: list[Any], domains: tuple[str, ...], refresh: int
) -> None:
    """With models that share a topic, epochs that end, and a snapshot that is said again in the middle."""
    hub = EventHub(1)
    trees = FakeTrees(hub)
    reader = hub.subscribe()
    for what in before:
        change(trees, what)
    rounds = iter(between)
    trees.between = lambda: [change(trees, what) for what in next(rounds, [])] and None
    shown, router, late = view(*domains, topic="kv@{worker}"), NameReader(), NameReader()
    later, is_late_there = iter(after), False

    def say(events: Any) -> None:
        for event in events:
            for one in shown.tell(event):
                router.hear(one.topic, one.event)
                if is_late_there:
                    late.hear(one.topic, one.event)

    for number, step in enumerate(follow(hub, trees, reader, None, 0.0)):
        match step:
            case Began():
                for topic in shown.topics:
                    router.hear(topic, AllBlocksCleared())
                shown.forget()
            case Part(_, events) | Changes(_, events):
                say(events)
            case Still():
                assert router.has() == expected(trees, domains)
                assert shown.num_blocks == len(router.has())
                if is_late_there:
                    assert late.has() == router.has()
                what = next(later, None)
                if what is None:
                    break
                change(trees, what)
        if number == refresh:
            is_late_there = True
            for events in slices(trees):
                say(events)


def test_what_is_said_can_be_read_by_the_codec() -> None:
    hub, trees = world()
    told = view(with_tokens=True).tell(stored(trees, hub, trees.place("w0", "a", "m", (1, 2, 3)))[0])
    batch = KvEventBatch(1.5, tuple(one.event for one in told))
    assert decode_batch(encode_batch(batch)) == batch
