"""Whom an Acquire names where there are many workers: few, the same ones for what begins alike, all in the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from coppice.ids import DomainId, WorkerEpoch, WorkerId
from coppice.messages.index import Acquire, NoCapacityReason, WorkerInfo, Workers
from coppice_scheduler.core.policy.candidates import CANDIDATES_MAX
from coppice_scheduler.core.state.request import OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W, tokens_of
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE

MANY = 40
SETTINGS = SchedulerSettings(instance=b"instance", max_running=500, max_step_tokens=600, match_window=0)


def bench_of(num_workers: int) -> Bench:
    """Workers "w", "w1", "w2", ..., all free. What is submitted waits for the next `advance`."""
    bench = Bench(changed(SETTINGS))
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", 64, BLOCK, NAMESPACE, "m", True)
    others = [replace(info, worker_id=WorkerId(f"w{number}")) for number in range(1, num_workers)]
    bench.core.index_message(Workers(bench.cache_epoch, (info, *others)), 0)
    for other in others:
        bench.core.worker_attached(other.worker_id, WorkerEpoch(1), True, 0)
    bench.hold = True
    return bench


def named(bench: Bench) -> dict[tuple[str, bytes], set[str]]:
    """Candidates of the Acquires that are not answered, by domain and tokens."""
    bench.advance()
    found = [op for op in bench.ops(Acquire) if isinstance(op, Acquire)]
    return {(op.domain, op.tokens): {candidate.worker_id for candidate in op.candidates} for op in found}


def asked_by(*requests: tuple[str, int], num_workers: int = MANY) -> list[set[str]]:
    """Whom each of these (domain, first token) names, in order."""
    bench = bench_of(num_workers)
    said = [(domain, tokens_of(100 + number % 100, first)) for number, (domain, first) in enumerate(requests)]
    for number, (domain, tokens) in enumerate(said):
        bench.submit(f"r{number}", 0, tenant=domain, domain=domain, tokens=tokens)
    found = named(bench)
    return [found[each] for each in said]


@pytest.mark.parametrize("num_workers", [1, CANDIDATES_MAX])
def test_few_workers_are_all_named(num_workers: int) -> None:
    assert [len(each) for each in asked_by(("a", 1), ("b", 2), num_workers=num_workers)] == [num_workers] * 2


def test_of_many_few_are_named_and_the_same_ones_for_what_begins_alike() -> None:
    first, longer, elsewhere, other = asked_by(("a", 1), ("a", 1), ("b", 1), ("a", 5000))
    assert len(first) == len(elsewhere) == len(other) == CANDIDATES_MAX
    assert first == longer
    assert first != elsewhere
    assert first != other


def test_all_are_named_by_somebody_and_nobody_by_most() -> None:
    counts = Counter(worker for each in asked_by(*(("a", 1000 * number) for number in range(200))) for worker in each)
    assert len(counts) == MANY
    even = 200 * CANDIDATES_MAX / MANY
    assert even / 2 < min(counts.values()) <= max(counts.values()) < even * 2


@pytest.mark.parametrize(
    "reason", [NoCapacityReason.POOL_FULL, NoCapacityReason.DOMAIN_MAXIMUM, NoCapacityReason.NEVER_FITS]
)
def test_who_was_refused_by_few_asks_all_at_once_and_holds_nobody_up(reason: NoCapacityReason) -> None:
    bench = bench_of(MANY)
    bench.submit("r", 20, domain="a")
    assert [len(each) for each in named(bench).values()] == [CANDIDATES_MAX]
    (op,) = bench.ops(Acquire)
    bench.answer_with(bench.no(op, reason))
    bench.submit("next", 20, tenant="b", domain="b", tokens=tokens_of(20, 7000))
    assert sorted(len(each) for each in named(bench).values()) == [CANDIDATES_MAX, MANY]
    assert not bench.outputs


def test_full_workers_are_replaced_by_the_next_of_the_same_order() -> None:
    (first,) = asked_by(("a", 1))
    bench = bench_of(MANY)
    full = sorted(first)[:4]
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", 64, BLOCK, NAMESPACE, "m", True)
    names = [W, *(WorkerId(f"w{number}") for number in range(1, MANY))]
    infos = [replace(info, worker_id=name, draining=name in full) for name in names]
    bench.core.index_message(Workers(bench.cache_epoch, tuple(infos)), 0)
    bench.submit("r0", 0, tenant="a", domain=DomainId("a"), tokens=tokens_of(100, 1))
    (again,) = named(bench).values()
    assert again & first == first - set(full)
    assert len(again) == CANDIDATES_MAX


@pytest.mark.parametrize(("num_blocks", "ends"), [(4, True), (5, False)], ids=["as small", "larger"])
def test_what_fits_no_worker_that_was_asked_waits_for_a_larger_one_that_drains(num_blocks: int, ends: bool) -> None:
    bench = bench_of(2)
    info = WorkerInfo(W, WorkerEpoch(1), "here:0", 4, BLOCK, NAMESPACE, "m", True)
    other = replace(info, worker_id=WorkerId("w1"), num_blocks=num_blocks)
    bench.core.index_message(Workers(bench.cache_epoch, (info, replace(other, draining=True))), 0)
    bench.submit("r", 4 * BLOCK)
    bench.submit("else", 5, tenant="b", domain="b")
    assert list(named(bench).values()) == [{W}, {W}]
    batch = bench.batches[0]
    refused = [op for op in batch if isinstance(op, Acquire) and op.domain == "d"]
    bench.answer_with(*(bench.no(op, NoCapacityReason.NEVER_FITS) if op in refused else bench.yes(op) for op in batch))
    assert bool(bench.outputs) is ends
    if ends:
        error = bench.last("r").error
        assert error is not None
        assert error.code is OutputErrorCode.NEVER_FITS
        return
    bench.submit("next", 6, tenant="b", domain="b")
    assert [key[0] for key in named(bench)] == ["b"], "its own domain alone is held up, for a while"
    bench.core.index_message(Workers(bench.cache_epoch, (info, other)), 0)
    bench.advance(500)
    assert {"w1"} <= named(bench)["d", tokens_of(4 * BLOCK)]
