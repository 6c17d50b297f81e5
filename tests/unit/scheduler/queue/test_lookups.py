"""Where a prompt is cached, asked for front doors that choose between planners: one answer for each question."""

from __future__ import annotations

from coppice.ids import CacheEpoch, DomainId
from coppice.messages.index import MatchHint, MatchHints, MatchQueries
from coppice_scheduler.core.state.request import LookedUp, Lookup
from tests.fakes.scheduler.scheduler_bench import Bench, W, tokens_of
from tests.unit.scheduler.queue.test_tenant_queue import occupied, queries


def lookup(number: int, num_tokens: int = 8, salt: bytes = b"") -> Lookup:
    return Lookup(number, DomainId("d"), tokens_of(num_tokens), salt)


def test_each_lookup_is_a_question_and_its_answer_goes_to_who_asked() -> None:
    bench = Bench()
    bench.core.look_up(lookup(5))
    bench.core.look_up(lookup(6, salt=b"s" * 16))
    assert not bench.advance().looked_up
    first, second = queries(bench)
    assert first.queries[0].tokens == tokens_of(8)
    assert first.queries[0].namespace != second.queries[0].namespace
    for found in (MatchHint((W,), (4,)), MatchHint((), ())):
        bench.core.index_message(MatchHints(bench.cache_epoch, (found,)), bench.now_ns)
    assert bench.advance().looked_up == (LookedUp(5, (W,), (4,)), LookedUp(6))
    assert not bench.advance().looked_up


def test_questions_of_lines_and_of_front_doors_are_answered_in_the_order_in_which_they_were_asked() -> None:
    bench = occupied()
    bench.submit("r2", 2)
    bench.core.look_up(lookup(5))
    bench.submit("r3", 3)
    asked = queries(bench)
    assert sorted(len(message.queries) for message in asked) == [1, 2]
    looked_up: list[LookedUp] = []
    for message in asked:
        hints = tuple(MatchHint((W,), (1,)) for _ in message.queries)
        bench.core.index_message(MatchHints(bench.cache_epoch, hints), bench.now_ns)
        looked_up += bench.advance().looked_up
    assert looked_up == [LookedUp(5, (W,), (1,))]


def test_without_the_cache_service_nothing_is_known() -> None:
    bench = Bench()
    bench.core.look_up(lookup(5))
    bench.advance()
    bench.core.index_lost(bench.now_ns)
    bench.core.look_up(lookup(6))
    assert bench.advance().looked_up == (LookedUp(6),)
    bench.core.index_attached(bench.core._life.leases.epoch, CacheEpoch(2), True, bench.now_ns)
    assert bench.advance().looked_up == (LookedUp(5),), "its answer will not come any more"


def test_an_answer_without_hints_is_an_empty_one() -> None:
    bench = Bench()
    bench.core.look_up(lookup(5))
    bench.advance()
    bench.core.index_message(MatchHints(bench.cache_epoch, ()), bench.now_ns)
    assert bench.advance().looked_up == (LookedUp(5),)
    assert [type(message) for message in bench.other_messages] == [MatchQueries]
