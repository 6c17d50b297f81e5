"""A worker takes every request that the scheduler takes, and the scheduler every one that a front door takes."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coppice.edge.codec import STEPS, MalformedFrame
from coppice.ids import DomainId, SequenceId
from coppice.messages.sampling import BEAMS_MAX, CHOICES_MAX, LIKELY_MAX, LOGPROBS_MAX, RANGES
from coppice.messages.sampling_bounds import impossible_field
from coppice.messages.step import SamplingParams, SequenceStart, StepPlan
from coppice.session.frames import Data
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.request_bounds import out_of_bounds
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TokenPrompt
from coppice_scheduler.edge.frontend.sampling_options import pack_bias, sampling_of
from coppice_scheduler.edge.text.checkpoint_text import SamplingDefaults
from coppice_worker.core.batch.steps import Applied, MalformedPlanError
from tests.fakes.worker.worker_plans import EPOCH, h, handles, lease, ready_core, u32

ENDS = [0, -1, 1, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, 1 << 64]
TOP_K = (1 << 31) - 1  # a worker has 32 bits for it, one of them the sign
PACKED = ("logit_bias", "stop_token_ids", "grammar")
SPEC = GenerationSpec("m", (TokenPrompt(u32(1)),))
numbers = st.floats() | st.sampled_from([end for allowed in RANGES.values() for end in allowed[:2]])
integers = st.integers(-2, 300) | st.sampled_from(ENDS) | st.integers()
biases = st.dictionaries(
    st.integers(0, (1 << 32) - 1), st.floats(-200, 200, width=32) | st.floats(width=32), max_size=3
)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """A few fields have any value, the others a good one."""
    counts = st.none() | integers | st.sampled_from([LIKELY_MAX, LIKELY_MAX + 1])
    values = dict.fromkeys(RANGES, numbers) | {
        "top_k": integers,
        "seed": integers,
        "logit_bias": biases.map(pack_bias) | st.binary(max_size=20),
        "min_tokens": integers,
        "stop_token_ids": st.binary(max_size=12),
        "num_logprobs": counts,
        "num_prompt_logprobs": counts,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(values)), max_size=3))
    return msgspec.structs.replace(SamplingParams(), **{name: draw(values[name]) for name in sorted(chosen)})


def request_of(sampling: SamplingParams) -> Request:
    return Request("r", "t", DomainId("t"), u32(1, 2), sampling, 3)


def worker_takes(sampling: SamplingParams) -> bool:
    """Whether a plan with it arrives, attaches its sequence and has a row of it computed."""
    sequence = SequenceStart(SequenceId(1), lease(1), u32(1, 2), 0, b"", b"", handles(h(1)), sampling)
    plan = StepPlan(1, attach=(sequence,), rows=u32(1), row_tokens=u32(2))
    try:
        frame = STEPS.from_client.decode(STEPS.from_client.encode(Data(1, 1, 0, plan)))
    except (MalformedFrame, OverflowError):
        return False
    assert isinstance(frame, Data)
    core = ready_core()
    try:
        applied = core.apply(EPOCH, frame.body)
    except MalformedPlanError:
        return False
    assert isinstance(applied, Applied)
    assert applied.refusals == ()
    assert applied.batch is not None
    return len(applied.batch.sample.rows) == 1


def assert_alike(sampling: SamplingParams) -> None:
    field = out_of_bounds(request_of(sampling))
    assert worker_takes(sampling) is not bool(field), f"{field or 'all'} of {sampling}"


@given(samplings())
@example(SamplingParams(logit_bias=pack_bias({7: float("-inf")})))
@example(SamplingParams(temperature=1e300))
@example(SamplingParams(min_tokens=(1 << 32) - 1, stop_token_ids=u32(1)))
def test_what_the_scheduler_takes_the_worker_takes(sampling: SamplingParams) -> None:
    assert_alike(sampling)


@pytest.mark.parametrize("name", [name for name in SamplingParams.__struct_fields__ if name not in PACKED])
def test_they_agree_at_the_ends_of_each_field(name: str) -> None:
    """A top_k of 2**31 fits the message, and none of the worker's arrays."""
    ends = [float(end) for end in RANGES[name][:2]] if name in RANGES else []
    near = [math.nextafter(end, away) for end in ends for away in (-math.inf, math.inf)]
    counts = [*ENDS, LIKELY_MAX, LIKELY_MAX + 1]
    for value in counts if isinstance(getattr(SamplingParams(), name), int | None) else [*ends, *near]:
        assert_alike(msgspec.structs.replace(SamplingParams(), **{name: value}))


@st.composite
def specs(draw: st.DrawFn) -> GenerationSpec:
    """Of a client's, with a few fields of any value."""
    counts = st.none() | st.integers(-1, LOGPROBS_MAX + 1)
    small = st.integers(-1, 20) | st.sampled_from(ENDS)
    values: dict[str, st.SearchStrategy[object]] = {name: st.none() | numbers for name in ("temperature", "top_p")}
    values |= {name: numbers for name in RANGES if name not in ("temperature", "top_p", "top_k")}
    values |= {
        "top_k": st.none() | small,
        "seed": st.none() | small | st.sampled_from([-end for end in ENDS]),
        "logit_bias": biases,
        "min_tokens": small,
        "stop_token_ids": st.lists(small, max_size=3).map(tuple),
        "num_logprobs": counts,
        "num_prompt_logprobs": counts,
        "echo": st.booleans(),
        "n": st.integers(0, CHOICES_MAX + 1),
        "uses_beams": st.booleans(),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(values)), max_size=3))
    return replace(SPEC, **{name: draw(values[name]) for name in sorted(chosen)})  # type: ignore[arg-type]


defaults = st.builds(
    SamplingDefaults,
    temperature=st.floats(0, RANGES["temperature"].high),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, TOP_K),
)


@example(replace(SPEC, top_k=-1), SamplingDefaults(), 500)  # off, in a client's words
@example(replace(SPEC, seed=-(1 << 63)), SamplingDefaults(), 500)
@example(replace(SPEC, n=1, best_of=BEAMS_MAX, uses_beams=True), SamplingDefaults(), 500)
@given(specs(), defaults, st.sampled_from([3, 500, 1 << 32]))
def test_what_a_front_door_takes_the_scheduler_takes(spec: GenerationSpec, own: SamplingDefaults, vocab: int) -> None:
    try:
        sampling = sampling_of(spec, own, {1, 2}, vocab)
    except ApiError:
        return
    assert out_of_bounds(request_of(sampling)) == ""


def test_each_field_is_looked_at() -> None:
    """All but the grammar, which is any text: a new field is bounded, or named here."""
    wrong: dict[str, object] = {name: allowed.high + 1 for name, allowed in RANGES.items()} | {
        "seed": -1,
        "logit_bias": bytes(12),
        "min_tokens": -1,
        "stop_token_ids": bytes(3),
        "num_logprobs": LIKELY_MAX + 1,
        "num_prompt_logprobs": -1,
    }
    assert {*wrong, "grammar"} == set(SamplingParams.__struct_fields__)
    for name, value in wrong.items():
        sampling = msgspec.structs.replace(SamplingParams(), **{name: value})
        assert impossible_field(sampling) == name
        assert out_of_bounds(request_of(sampling)) == f"sampling.{name}"
    assert impossible_field(SamplingParams(grammar="any text")) == ""
