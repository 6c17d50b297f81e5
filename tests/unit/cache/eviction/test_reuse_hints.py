"""What is known of the future of prompts: the client's word, and what kind of call it came with."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from coppice.messages.index import Acquire, Release
from coppice.messages.reuse import CALL_KINDS, Outcome, Reuse
from coppice.seals import NO_CHAIN_KEY
from coppice_bench.trace.file import Request, Trace
from coppice_bench.trace.generated import agents
from coppice_bench.trace.hints import comes_again, hints
from coppice_bench.trace.replay import replay
from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction import hazard
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.hazard import HazardModel, features
from coppice_cache.core.eviction.policy import LruPolicy, ReuseHint, hint_of
from coppice_cache.core.radix.tree import Node, Tree, add_child
from coppice_cache.core.recovery import registration
from tests.unit.cache.eviction.test_eviction import leaves
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, tokens

ASKED, LISTED = 2, 9  # kinds of calls


@pytest.mark.parametrize(("reuse", "place"), [(Reuse.UNLIKELY, 0), (Reuse.LIKELY, -1)])
def test_a_hint_at_the_end_moves_a_leaf(reuse: Reuse, place: int) -> None:
    policy = AdaptivePolicy()
    found = leaves(policy, 5)
    policy.hinted(found[2], ReuseHint(reuse))
    assert policy.next_victims(5)[place] is found[2]


def test_a_release_that_says_unlikely_makes_room_first() -> None:
    world = World(num_blocks=6)
    first, second = tokens(8, 100), tokens(8, 200)
    world.fill(1, first)
    world.granted(2, second)
    world.publish(2, 0, second)
    world.do(Release(lease_id(2), Reuse.UNLIKELY))
    world.granted(3, tokens(16, 500))
    assert world.core.match(ALICE, NAMESPACE, first + tokens(1), W).num_blocks == 2


def returning_and_single(count: int, apart: int) -> Trace:
    """Of one kind each prompt comes twice, of the other each is one of a kind; all are equally long."""
    requests: list[Request] = []
    for number in range(count):
        asked = tuple(range(number * 8, number * 8 + 4))
        requests.append(Request(number, 0, asked, ASKED))
        requests.append(Request(number, 0, tuple(range(number * 8 + 4, number * 8 + 8)), LISTED))
        if number >= apart:
            earlier = tuple(range((number - apart) * 8, (number - apart) * 8 + 4))
            requests.append(Request(number, 0, earlier, ASKED))
    return Trace(tuple(requests), 0)


def test_kinds_of_calls_whose_prompts_come_again_are_learned() -> None:
    trace = returning_and_single(2_000, apart=40)
    kinds = [ReuseHint(call_kind=request.call_kind) for request in trace.requests]
    unsaid, said = (replay(trace, AdaptivePolicy(), 240, told).hits for told in ((), kinds))
    assert said > 1.3 * unsaid


def test_a_word_is_trusted_as_far_as_it_was_right_in_calls_of_that_kind() -> None:
    model = HazardModel()

    def level(hint: int, kind: int) -> int:
        return model.level(features(1, 4, access=hazard.USED, hint=hint, call_kind=kind))

    likely = 1
    assert level(likely, ASKED) == level(likely, LISTED) > level(0, ASKED)
    for _ in range(400):
        model.learn(features(1, 4, access=hazard.USED, hint=likely, call_kind=LISTED), 6, 1, was_used=False)
        model.learn(features(1, 4, access=hazard.USED, hint=0, call_kind=LISTED), 6, 1, was_used=True)
        model.take_over()
    assert level(likely, LISTED) < level(0, LISTED), "whoever is always wrong is believed to be"
    assert level(likely, ASKED) > level(0, ASKED), "which says nothing of calls of other kinds"


@pytest.mark.parametrize("kind", [ASKED, CALL_KINDS - 1])
def test_a_kind_that_only_a_newer_scheduler_knows_is_none(kind: int) -> None:
    op = Acquire(lease_id(1), ALICE, NAMESPACE, tokens(8), 8, (), reuse=Reuse.LIKELY, call_kind=kind)
    assert hint_of(op) == ReuseHint(Reuse.LIKELY, kind)
    assert hint_of(msgspec.structs.replace(op, call_kind=kind + CALL_KINDS)) == ReuseHint(Reuse.LIKELY, 0)


def grown(policy: AdaptivePolicy, parent: Node, token: int) -> Node:
    """A block below it."""
    node = add_child(parent, token.to_bytes(8, "little"), bytes(8), block_bytes=8, now_ns=0)
    policy.created(node, token.to_bytes(16, "little"), 1, ReuseHint())
    return node


class Heard(LruPolicy):
    """Writes down what it is told of the runs of a domain."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, ReuseHint]] = []

    def touched(self, nodes: list[Node], new_blocks: int, hint: ReuseHint, num_cached: int, now_ns: int) -> None:
        self.said.append(("touched", hint))

    def created(self, node: Node, seals: bytes, new_blocks: int, hint: ReuseHint) -> None:
        self.said.append(("created", hint))

    def hinted(self, node: Node, hint: ReuseHint) -> None:
        self.said.append(("hinted", hint))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    policy = Heard()
    monkeypatch.setattr(registration, "POLICIES", dict.fromkeys(Eviction, lambda: policy))
    return policy


def test_the_policy_hears_what_an_acquire_says_when_it_is_granted_stored_and_released(heard: Heard) -> None:
    world = World(num_blocks=6)
    said = ReuseHint(Reuse.UNLIKELY, ASKED)
    world.granted(1, tokens(8), reuse=said.reuse, call_kind=said.call_kind)
    world.publish(1, 0, tokens(8))
    world.do(Release(lease_id(1), Reuse.UNLIKELY))
    assert heard.said == [("touched", said), ("created", said), ("hinted", said)]


def test_what_a_scheduler_says_for_itself_is_no_word_of_that_kind_of_call(heard: Heard) -> None:
    world = World(num_blocks=6)
    world.granted(1, tokens(8), reuse=Reuse.UNLIKELY, call_kind=ASKED)
    world.publish(1, 0, tokens(8))
    world.do(Release(lease_id(1), Reuse.LIKELY))  # it was preempted
    assert heard.said[-1] == ("hinted", ReuseHint(Reuse.LIKELY, 0))


def test_the_policy_hears_at_its_release_that_an_answer_called_tools(heard: Heard) -> None:
    world = World(num_blocks=6)
    world.granted(1, tokens(8), reuse=Reuse.UNLIKELY, call_kind=ASKED)
    world.publish(1, 0, tokens(8))
    world.do(Release(lease_id(1), Reuse.UNLIKELY, Outcome.CALLED_TOOLS))
    assert heard.said[-1] == ("hinted", ReuseHint(Reuse.UNLIKELY, ASKED, Outcome.CALLED_TOOLS))
    world.granted(2, tokens(8, 100), call_kind=ASKED)
    world.publish(2, 0, tokens(8, 100))
    world.do(Release(lease_id(2)))
    assert heard.said[-1] == ("created", ReuseHint(call_kind=ASKED)), "nothing more is known of it"
    world.granted(3, tokens(8, 200), call_kind=ASKED)
    world.publish(3, 0, tokens(8, 200))
    world.do(Release(lease_id(3), outcome=Outcome.CALLED_NONE))
    assert heard.said[-1] == ("hinted", ReuseHint(call_kind=ASKED, outcome=Outcome.CALLED_NONE))


def test_what_an_answer_that_called_tools_goes_on_from_is_kept_whole() -> None:
    """All runs of its own, and none that others begin with."""
    policy = AdaptivePolicy()
    begun = grown(policy, Tree(ALICE, NAMESPACE, NO_CHAIN_KEY, 8), 1)
    mine = grown(policy, grown(policy, begun, 2), 3)
    other = grown(policy, begun, 4)
    before = [node.level for node in (begun, other)]
    policy.hinted(mine, ReuseHint(outcome=Outcome.CALLED_TOOLS))
    assert [node.level for node in (begun, other)] == before
    assert mine.parent is not None
    assert min(mine.level, mine.parent.level) > max(before)


def test_loops_over_tools_are_kept_and_ended_ones_are_not() -> None:
    trace = agents(1, 3_000)
    said = [ReuseHint(call_kind=one.call_kind) for one in trace.requests]
    told = [hint._replace(outcome=one.outcome) for hint, one in zip(said, trace.requests, strict=True)]
    unsaid, known = (replay(trace, AdaptivePolicy(), 1_500, hints).hits for hints in (said, told))
    assert known > 1.05 * unsaid


def test_a_release_says_nothing_of_what_others_go_on_from(heard: Heard) -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(8), reuse=Reuse.UNLIKELY)
    world.publish(1, 0, tokens(8))
    world.fill(2, tokens(16))
    heard.said.clear()
    world.do(Release(lease_id(1), Reuse.UNLIKELY))
    assert not heard.said


def test_a_hint_says_nothing_of_a_beginning_that_others_share() -> None:
    """One tenant's prompts begin alike, and none of them comes again."""
    trace = Trace(tuple(Request(at, 0, (1, 2, 3, 4, at * 2 + 10, at * 2 + 11)) for at in range(200)), 0)
    never = [ReuseHint(Reuse.UNLIKELY)] * len(trace.requests)
    assert replay(trace, AdaptivePolicy(), 12, never).hits == 4 * 199


def test_hints_of_the_benchmark_are_right_as_often_as_is_asked() -> None:
    trace = returning_and_single(500, apart=40)
    truth = comes_again(trace)
    assert truth[:2] == [True, False]
    right = {accuracy: hints(trace, accuracy, seed=1) for accuracy in (0.5, 0.8, 1.0)}
    for accuracy, said in right.items():
        agree = sum((reuse is Reuse.LIKELY) == known for reuse, known in zip(said, truth, strict=True))
        assert agree / len(truth) == pytest.approx(accuracy, abs=0.04)
    in_part = replace(trace, requests=(Request(0, 3, (1,)), Request(1, 3, (1,))), block_size=16)
    assert comes_again(in_part) == [None, None], "it has no full block"
    assert hints(in_part, 1.0, seed=1) == [Reuse.UNKNOWN] * 2
