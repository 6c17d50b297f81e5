"""What goes wrong while a request is decided on is that request's alone, and nothing has changed by it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.messages.sampling import LIKELY_MAX
from coppice.messages.step import SamplingParams
from coppice_scheduler.core import engine
from coppice_scheduler.core.engine import SubmitFailed
from coppice_scheduler.core.state.request import Finish, RefusedReason
from coppice_scheduler.core.state.request_bounds import out_of_bounds
from tests.fakes.scheduler.scheduler_bench import Bench

U31, U32, U64 = 1 << 31, 1 << 32, 1 << 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", b"abc"),
        ("number", -1),
        ("number", U32),
        ("max_new_tokens", 1 << 63),
        ("stop_token_ids", frozenset({1, U32 - 1})),
        ("stop_token_ids", frozenset({-1})),
        ("retain_ms", U32),
        ("sampling", SamplingParams(seed=U64)),
        ("sampling", SamplingParams(seed=-1)),
        ("sampling", SamplingParams(top_k=-1)),
        ("sampling", SamplingParams(top_k=U31)),
        ("sampling", SamplingParams(temperature=float("nan"))),
        ("sampling", SamplingParams(min_tokens=U32)),
        ("sampling", SamplingParams(num_logprobs=-1)),
        ("sampling", SamplingParams(logit_bias=b"1234")),
        ("sampling", SamplingParams(stop_token_ids=b"1")),
    ],
)
def test_a_value_that_would_fail_in_a_plan_is_refused_by_name(field: str, value: object) -> None:
    bench = Bench()
    refused = bench.submit("r", 3, **{field: value})
    assert refused is not None
    assert refused.reason is RefusedReason.INTERNAL
    assert field in refused.message
    assert bench.core.is_idle()


def test_the_largest_values_that_fit_are_planned() -> None:
    bench = Bench()
    sampling = SamplingParams(seed=U64 - 1, top_k=U31 - 1, min_tokens=U32 - 1, num_logprobs=0)
    fields = {"number": U32 - 1, "stop_token_ids": frozenset({U32 - 2}), "sampling": sampling}
    assert bench.submit("r", 3, **fields) is None
    bench.settle()
    (start,) = bench.plans[0].attach
    assert start.sampling == sampling


def test_after_a_failed_decision_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.submit("other", 3, max_new=1)
    bench.settle()
    before = bench.core.stats()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "state_of", lambda *of_request: 1 / 0)
        with pytest.raises(SubmitFailed, match="request r: ZeroDivisionError") as failed:
            bench.submit("r", 3)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    bench.core.check()
    assert bench.core.stats() == before
    assert bench.submit("r", 3, max_new=1) is None
    bench.settle()
    while bench.plans:
        bench.result({1: 5, 2: 5})
        bench.settle()
    assert [bench.last(name).finish for name in ("other", "r")] == [Finish.LENGTH, Finish.LENGTH]


def test_an_id_that_is_in_use_is_the_second_ones_fault() -> None:
    bench = Bench()
    bench.submit("r", 3)
    with pytest.raises(SubmitFailed, match="in use"):
        bench.submit("r", 3)
    assert bench.core.stats().waiting == 1


def test_what_changes_the_core_is_not_called_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.core._life, "enter", lambda request, now_ns: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.submit("r", 3)


def test_a_request_as_a_front_door_makes_it_is_within_bounds() -> None:
    bench = Bench()
    bench.submit("r", 3)
    request = bench.core._life.requests["r"].request
    assert out_of_bounds(request) == ""
    assert out_of_bounds(replace(request, tokens=b"x")) == "tokens"
    for name in ("num_logprobs", "num_prompt_logprobs"):  # a worker would refuse the plan, and end the session of all
        for number, field in ((LIKELY_MAX, ""), (LIKELY_MAX + 1, f"sampling.{name}"), (-1, f"sampling.{name}")):
            sampling = replace(request.sampling, **{name: number})
            assert out_of_bounds(replace(request, sampling=sampling)) == field
