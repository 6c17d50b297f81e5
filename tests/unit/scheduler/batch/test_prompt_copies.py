"""A prompt is held once: whatever says its tokens says the request's own bytes, and what the cache has is counted."""

from __future__ import annotations

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.index import Acquire, MatchQueries, Publish, Reattached, Reclaim
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W, tokens_of

PROMPT = 2 * BLOCK + 2


def state_of(bench: Bench, name: str = "r") -> RequestState:
    return bench.core._life.requests[name]


def running() -> Bench:
    """The prompt is computed, its first token sampled."""
    bench = Bench()
    bench.submit("r", PROMPT, max_new=40)
    bench.settle()
    bench.result({1: 9})
    return bench


def publications(bench: Bench) -> list[tuple[int, int, bytes]]:
    return [(op.first_block, op.num_named_blocks, op.tokens) for op in bench.ops(Publish) if isinstance(op, Publish)]


def decode(bench: Bench, num_tokens: int) -> list[tuple[int, int, bytes]]:
    """What is published while so many tokens are sampled."""
    found = publications(bench)
    bench.settle()
    for _ in range(num_tokens):
        bench.result(dict.fromkeys(bench.core._life.workers[W].running, 9))
        found += publications(bench)
        bench.settle()
    return found


def test_acquire_and_plan_say_the_bytes_that_came() -> None:
    bench = Bench()
    bench.submit("r", PROMPT)
    tokens = state_of(bench).request.tokens
    (acquire,) = bench.ops(Acquire)
    assert isinstance(acquire, Acquire)
    assert acquire.tokens is tokens
    bench.settle()
    assert bench.plans[0].attach[0].tokens is tokens


def test_so_does_the_question_what_the_cache_would_find() -> None:
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=1, max_step_tokens=64))
    for name in ("r", "s", "t"):
        bench.submit(name, PROMPT)
    (queries,) = [message for message in bench.other_messages if isinstance(message, MatchQueries)]
    assert [
        query.tokens is state_of(bench, name).request.tokens for query, name in zip(queries.queries, "st", strict=True)
    ]


def test_forks_hold_the_bytes_of_their_leader() -> None:
    bench = Bench()
    bench.submit("r", PROMPT)
    bench.submit("s", PROMPT, fork_of="r")
    bench.submit("t", PROMPT, fork_of="s")
    bench.submit("u", PROMPT)
    leader, *others = (state_of(bench, name).request.tokens for name in "rstu")
    assert [tokens is leader for tokens in others] == [True, True, False]


def test_blocks_of_the_prompt_are_counted_and_those_behind_it_said() -> None:
    bench = running()
    assert publications(bench) == [(0, 2, b"")]
    found = decode(bench, 5 * BLOCK)
    nine = (9).to_bytes(4, "little")
    assert found[1] == (2, 0, tokens_of(2, 100 + 2 * BLOCK) + nine * (4 * BLOCK - 2))
    assert all(not named for _, named, _ in found[1:])


def test_after_a_preemption_its_output_counts_as_named() -> None:
    bench = running()
    decode(bench, 2 * BLOCK)
    bench.core.index_message(Reclaim(bench.cache_epoch, W, state_of(bench).request.domain, 1), 0)
    bench.advance()
    while not bench.ops(Acquire):
        bench.result({1: 9})
    acquire = bench.ops(Acquire)[0]
    assert isinstance(acquire, Acquire)
    num_tokens = PROMPT + 2 * BLOCK + 1
    assert acquire.tokens == tokens_of(PROMPT) + (9).to_bytes(4, "little") * (num_tokens - PROMPT)
    bench.settle()
    attached: list[bytes] = []
    while not bench.ops(Publish):
        attached += [start.tokens for start in bench.result({2: 9}).attach]
    assert attached == [acquire.tokens]
    assert publications(bench) == [(0, num_tokens // BLOCK, b"")]


def test_after_a_restart_of_the_cache_all_tokens_are_said() -> None:
    bench = running()
    assert publications(bench) == [(0, 2, b"")]
    bench.batches.clear()
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), bench.cache_epoch, True, 0)
    (lease,) = bench.core._life.leases.leases
    bench.core.index_message(Reattached(bench.cache_epoch, (lease,), (), (0,)), 0)
    bench.advance()
    assert publications(bench) == [(0, 0, tokens_of(2 * BLOCK))]


def test_what_was_asked_again_of_a_restarted_cache_is_named() -> None:
    """It had no answer to its Acquire, so the new incarnation hears the prompt, too."""
    bench = Bench()
    bench.submit("r", PROMPT)
    bench.batches.clear()
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), bench.cache_epoch, True, 0)
    bench.advance()
    assert len(bench.ops(Acquire)) == 1
    bench.list_workers(1)
    bench.settle()
    bench.result({1: 9})
    assert publications(bench) == [(0, 2, b"")]
