"""A publisher's sequence over a bad network: whatever is lost, doubled, late or said by a new incarnation, what is
believed is the publisher's own state, or a part of it, and with a replay it becomes all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coppice.messages.kv_events import BlockRemoved, BlockStored, KvEventBatch
from coppice_cache.engine_index.core.event_stream import Message, StreamLimits
from coppice_cache.engine_index.core.fleet import Delivery, Fleet, FleetLimits
from coppice_cache.engine_index.core.keys import lora_tag

LIMITS = StreamLimits(recent_max=16, held_max=4, replay_timeout_ns=1_000, attempts_max=3)


@dataclass
class Publisher:
    """An engine: its cache is a plain set of blocks, each a prompt of its own. Keeps everything for a replay."""

    incarnation: int = 0
    said: list[Message] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)

    def toggle(self, block: int, unreadable: bool = False) -> Message:
        tokens = block.to_bytes(4, "little")
        event = (
            BlockRemoved((block,), "GPU")
            if block in self.cached
            else BlockStored((block,), None, tokens, 1, None, "GPU")
        )
        self.cached ^= {block}
        sequence = len(self.said)
        batch = None if unreadable else KvEventBatch(0.0, (event,), 0)
        self.said.append(Message(sequence, hash((self.incarnation, sequence)), 100, batch))
        return self.said[-1]

    def restart(self) -> None:
        self.incarnation += 1
        self.said, self.cached = [], set()


class World:
    """One publisher, one reader, and what is under way between them."""

    def __init__(self, can_replay: bool) -> None:
        self.fleet = Fleet(FleetLimits(stream=LIMITS))
        self.feed = self.fleet.add_feed("w", can_replay=can_replay)
        self.publisher = Publisher()
        self.can_replay = can_replay
        self.flying: list[Message] = []
        self.asked: list[int] = []
        self.now = 1
        self.do(self.fleet.connected(self.feed, self.now))

    def do(self, asked: list[int]) -> None:
        self.asked = asked[-1:] or self.asked

    def deliver(self, message: Message) -> None:
        self.do(self.fleet.live(self.feed, Delivery("", message), self.now))

    def replay(self) -> None:
        """The publisher answers the youngest request, in order; a newer request ends the older one."""
        if not self.asked:
            return
        start = self.asked.pop()
        for message in self.publisher.said[start:]:
            self.do(self.fleet.replayed(self.feed, Delivery(None, message), self.now))
            if self.asked:
                return
        self.do(self.fleet.replay_ended(self.feed, self.now))

    def believed(self) -> set[int]:
        found = set()
        for block in range(12):
            hits = self.fleet.match(block.to_bytes(4, "little"), b"", b"")
            found |= {block} if hits and hits[0].matched_tokens else set()
        return found

    def restart(self) -> None:
        for message in self.flying:  # a connection delivers what it has, or loses it, before it is gone
            self.deliver(message)
        self.flying.clear()
        self.publisher.restart()
        self.do(self.fleet.disconnected(self.feed))

    def settle(self) -> None:
        for message in self.flying:
            self.deliver(message)
        self.flying.clear()
        self.now += 10_000
        self.do(self.fleet.connected(self.feed, self.now))
        for _ in range(20):
            self.replay()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 11)),
        st.tuples(st.just("lose"), st.integers(0, 11)),
        st.tuples(st.just("garble"), st.integers(0, 11)),
        st.tuples(st.sampled_from(["deliver", "double", "late"]), st.integers(0, 99)),
        st.tuples(st.sampled_from(["replay", "restart", "connect", "expire"]), st.just(0)),
    ),
    max_size=60,
)


def play(world: World, steps: list[tuple[str, int]]) -> None:
    flying = world.flying
    for kind, value in steps:
        if kind in ("say", "lose"):
            message = world.publisher.toggle(value)
            flying += [message] if kind == "say" else []
        elif kind == "garble":
            flying += [] if world.can_replay else [world.publisher.toggle(value, unreadable=True)]
        elif kind == "restart":
            world.restart()
        elif kind == "connect":
            world.do(world.fleet.connected(world.feed, world.now))
        elif kind == "expire":
            world.now += 2_000
            world.do(world.fleet.expire(world.feed, world.now))
        elif kind == "replay":
            world.replay()
        elif flying:
            index = 0 if kind == "deliver" else value % len(flying)
            world.deliver(flying[index] if kind == "double" else flying.pop(index))


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_with_a_replay_every_delivery_converges_to_the_truth(steps: list[tuple[str, int]]) -> None:
    world = World(can_replay=True)
    play(world, steps)
    world.settle()
    assert world.believed() == world.publisher.cached
    status = world.fleet.sources()[0]
    assert status.is_trusted
    assert status.next_sequence == len(world.publisher.said)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 11))
def test_without_a_replay_nothing_false_is_believed_after_the_next_message(
    steps: list[tuple[str, int]], block: int
) -> None:
    world = World(can_replay=False)
    play(world, steps)
    world.flying.clear()
    world.deliver(world.publisher.toggle(block))
    assert world.believed() <= world.publisher.cached


def feed(world: World, *blocks: int) -> None:
    for block in blocks:
        world.deliver(world.publisher.toggle(block))


def counts(world: World):  # type: ignore[no-untyped-def]
    return world.fleet.sources()[0].counts


def followed() -> World:
    world = World(can_replay=True)
    world.replay()
    return world


def test_the_first_number_above_zero_is_a_gap_and_is_filled() -> None:
    world = followed()
    world.publisher.toggle(1)
    feed(world, 2)
    assert world.asked == [0]
    assert world.believed() == set(), "withheld while it recovers"
    world.replay()
    assert world.believed() == {1, 2}
    assert counts(world).gaps == 1


def test_a_doubled_message_is_no_restart() -> None:
    world = followed()
    feed(world, 1, 2)
    world.deliver(world.publisher.said[0])
    assert world.believed() == {1, 2}
    assert (counts(world).duplicates, counts(world).restarts) == (1, 0)


def test_a_worker_that_restarts_in_place_takes_its_old_blocks_along() -> None:
    world = followed()
    feed(world, 1, 2, 3)
    world.publisher.restart()
    feed(world, 4)
    assert world.believed() == {4}
    assert counts(world).restarts == 1


def test_a_restart_that_got_beyond_our_number_unseen_is_found_by_the_message_that_we_know() -> None:
    world = followed()
    feed(world, 1, 2, 3)
    world.publisher.restart()
    for block in (4, 5, 6, 7):
        world.publisher.toggle(block)
    feed(world, 8)
    assert world.believed() == set()
    for _ in range(3):
        world.replay()
    assert world.believed() == {4, 5, 6, 7, 8}


def test_a_restart_that_stands_at_our_number_is_found_because_the_connection_broke() -> None:
    world = followed()
    feed(world, 1, 2, 3)
    world.restart()
    for block in (4, 5, 6):
        world.publisher.toggle(block)
    feed(world, 7)  # number 3, the one that was expected next
    world.do(world.fleet.connected(world.feed, 1))
    for _ in range(3):
        world.replay()
    assert world.believed() == {4, 5, 6, 7}


def test_a_publisher_that_forgot_the_message_that_we_know_is_not_believed_to_be_the_same() -> None:
    world = followed()
    feed(world, 1, 2)
    world.publisher.restart()
    for block in (3, 4):
        world.publisher.toggle(block)
    feed(world, 5, 6)  # 5 is number 2, the one that is missing: what we know of is just not kept any more
    world.do(world.fleet.connected(world.feed, 1))
    world.asked.clear()
    feed(world, 7)
    for message in world.publisher.said[4:]:
        world.do(world.fleet.replayed(world.feed, Delivery(None, message), 1))
    world.do(world.fleet.replay_ended(world.feed, 1))
    assert world.believed() == {7}


def test_what_the_publisher_forgot_is_withheld() -> None:
    world = followed()
    feed(world, 1, 2)
    for block in (3, 4, 5):
        world.publisher.toggle(block)
    feed(world, 6)
    start, kept = world.asked.pop(), world.publisher.said[4:]
    assert start == 1
    for message in kept:
        world.do(world.fleet.replayed(world.feed, Delivery(None, message), 1))
    world.do(world.fleet.replay_ended(world.feed, 1))
    assert world.believed() == {5, 6}
    assert counts(world).clears == 1


def test_a_hole_within_a_replay_is_asked_for_again() -> None:
    world = followed()
    for block in range(6):
        world.publisher.toggle(block)
    feed(world, 6)
    world.asked.clear()
    for message in (world.publisher.said[0], world.publisher.said[4]):
        world.do(world.fleet.replayed(world.feed, Delivery(None, message), 1))
    assert world.asked == [0]
    world.replay()
    assert world.believed() == set(range(7))
    assert counts(world).clears == 0


def test_a_replay_that_never_answers_is_given_up() -> None:
    world = followed()
    feed(world, 1)
    world.publisher.toggle(2)
    feed(world, 3)
    for _ in range(LIMITS.attempts_max):
        assert world.asked
        world.asked.clear()
        world.now += 2_000
        world.do(world.fleet.expire(world.feed, world.now))
    assert world.believed() == set()
    assert world.fleet.sources()[0].is_trusted
    feed(world, 4)
    assert world.believed() == {4}
    world.do(world.fleet.connected(world.feed, world.now))
    world.replay()
    assert world.believed() == {1, 2, 3, 4}, "now that it answers"


def test_an_overlong_buffer_is_asked_for_again() -> None:
    world = followed()
    world.publisher.toggle(0)
    served = list(world.publisher.said)
    feed(world, *range(1, 1 + LIMITS.held_max + 2))
    assert counts(world).held_over == 1
    world.asked.clear()
    for message in served:
        world.do(world.fleet.replayed(world.feed, Delivery(None, message), 1))
    world.do(world.fleet.replay_ended(world.feed, 1))
    world.replay()
    assert world.believed() == world.publisher.cached


@pytest.mark.parametrize("can_replay", [True, False])
def test_an_unreadable_message_costs_the_state_and_no_more(can_replay: bool) -> None:
    world = World(can_replay=can_replay)
    world.replay()
    feed(world, 1)
    world.deliver(world.publisher.toggle(2, unreadable=True))
    world.replay()
    assert world.believed() == set()
    feed(world, 3)
    assert world.believed() == {3}
    assert counts(world).unreadable == 1


def test_without_a_connection_nothing_is_believed() -> None:
    world = followed()
    feed(world, 1)
    world.do(world.fleet.disconnected(world.feed))
    assert world.believed() == set()
    assert not world.fleet.sources()[0].is_connected
    world.do(world.fleet.connected(world.feed, 1))
    world.replay()
    assert world.believed() == {1}


def test_ranks_and_topics_are_apart() -> None:
    fleet = Fleet()
    feed_id = fleet.add_feed("pool", can_replay=False)
    for pod, rank, block in (("a", 0, 1), ("a", 1, 2), ("b", 0, 3)):
        event = BlockStored((block,), None, block.to_bytes(4, "little"), 1)
        message = Message(0, block, 10, KvEventBatch(0.0, (event,), rank))
        assert fleet.live(feed_id, Delivery(f"kv@{pod}@llama", message), 1) == []
    hits = fleet.match((2).to_bytes(4, "little"), b"", b"")
    assert [(hit.source, hit.dp_rank, hit.model, hit.matched_tokens) for hit in hits] == [
        ("a", 1, "llama", 1),
        ("a", 0, "llama", 0),
        ("b", 0, "llama", 0),
    ]
    assert [hit.source for hit in fleet.match(b"\1\0\0\0", lora_tag(None), b"", only=["b"])] == ["b"]
