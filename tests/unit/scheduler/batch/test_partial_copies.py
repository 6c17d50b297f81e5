"""A grant may name a block whose beginning continues the match: it is copied, counts as cached, and is not computed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import WorkerEpoch
from coppice.messages.index import Acquire, Grant, Release
from coppice.messages.step import COPY_SOURCE_SINCE, Refusal, RefusalCode
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W, rows_of

SEAL = b"c" * 16


def asking(num_tokens: int = 11, version: int = COPY_SOURCE_SINCE) -> tuple[Bench, Acquire]:
    bench = Bench()
    bench.core.worker_attached(W, WorkerEpoch(1), True, 0, version)
    bench.submit("r", num_tokens)
    (op,) = bench.ops(Acquire)
    assert isinstance(op, Acquire)
    return bench, op


def granted(bench: Bench, op: Acquire, num_copied: int = 3, source: bytes | None = None) -> Grant:
    grant = bench.yes(op, cached_blocks=1)
    assert isinstance(grant, Grant)
    found = bench.handles(1) if source is None else source
    return replace(grant, copy_source=found, copy_seal=SEAL, num_copy_tokens=num_copied)


def test_what_is_copied_is_cached_and_not_computed() -> None:
    bench, op = asking()
    assert op.wants_copy
    grant = granted(bench, op)
    bench.answer_with(grant)
    plan = bench.plans[0]
    (start,) = plan.attach
    assert (start.copy_source, start.copy_seal, start.copy_from) == (grant.copy_source, SEAL, 0)
    assert start.num_computed_tokens == BLOCK + 3
    assert rows_of(plan) == {1: 11 - BLOCK - 3}
    bench.result({1: 7})
    bench.settle()
    while not any(output.finish for output in bench.outputs):
        bench.result({1: 8})
        bench.settle()
    assert bench.last("r").num_cached_tokens == BLOCK + 3


def test_a_worker_of_the_version_before_copies_nothing() -> None:
    bench, op = asking(version=COPY_SOURCE_SINCE - 1)
    assert not op.wants_copy
    bench.answer_with(granted(bench, op))
    plan = bench.plans[0]
    assert (plan.attach[0].copy_source, plan.attach[0].num_computed_tokens) == (b"", BLOCK)
    assert rows_of(plan) == {1: 11 - BLOCK}


def test_a_source_that_was_refused_is_not_asked_for_again() -> None:
    bench, op = asking()
    bench.answer_with(granted(bench, op))
    bench.result({}, (Refusal(1, RefusalCode.LOST_SOURCE, 5),))  # type: ignore[arg-type]
    (again,) = bench.ops(Acquire)
    assert isinstance(again, Acquire)
    assert not again.wants_copy
    assert not any(output.finish for output in bench.outputs), "it costs no retry and no answer"


def test_the_source_is_released_with_the_lease_and_not_before_the_step() -> None:
    bench, op = asking()
    bench.answer_with(granted(bench, op))
    bench.cancel("r")
    while not (plan := bench.plans[0]).detach:
        assert not bench.ops(Release)
        bench.result(dict.fromkeys(rows_of(plan), 7))
    assert not bench.ops(Release)
    bench.result()
    assert len(bench.ops(Release)) == 1


@pytest.mark.parametrize("num_copied", [7, BLOCK])
def test_a_grant_that_copies_too_much_is_an_error(num_copied: int) -> None:
    bench, op = asking(num_tokens=11 if num_copied == BLOCK else 8)
    bench.answer_with(granted(bench, op, num_copied))
    output = bench.last("r")
    assert output.finish is Finish.ERROR
    assert output.error is not None
    assert output.error.code is OutputErrorCode.INTERNAL
