"""What of an answer's life becomes a metric."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from coppice.request_log.causes import causes_of
from coppice.request_log.phases import Phases, ns_by_kind, phases_of
from coppice.request_log.stages import History, Stage, StageKind
from coppice_scheduler.edge.base.metrics import (
    FAILURE_CODES,
    FINISH_REASONS,
    AnswerEnd,
    FrontDoorMetrics,
)

S = 1_000_000_000
SPENT = "coppice_request_time_seconds_total"


def life(*kinds: tuple[StageKind, float]) -> tuple[Stage, ...]:
    """Each from the moment that it names, in seconds; the last one only ends."""
    history = History(kinds[0][0], int(kinds[0][1] * S))
    for kind, at_s in kinds[1:-1]:
        if kind in (StageKind.PREEMPTED, StageKind.ASKED_BACK):
            history.happened(kind, int(at_s * S))
        else:
            history.becomes(kind, int(at_s * S))
    return history.told(int(kinds[-1][1] * S))


K = StageKind
PLAIN = life((K.QUEUED, 10), (K.POOL_FULL, 10.5), (K.ACQUIRE, 12), (K.PREFILL, 12.25), (K.DECODE, 13), (K.DECODE, 17))
PREEMPTED = life(
    (K.QUEUED, 0), (K.PREFILL, 1), (K.DECODE, 2), (K.PREEMPTED, 3), (K.QUEUED, 3), (K.PREFILL, 5), (K.DECODE, 6),
    (K.DECODE, 7),
)  # fmt: skip
FORK = life((K.FORK, 0), (K.DECODE, 2), (K.DECODE, 5))


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = FrontDoorMetrics(self.registry, "demo")

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "demo", "tenant": "a", **labels})

    def spent(self) -> dict[str, float]:
        found = {kind.value: self.value(SPENT, cause=kind.value) for kind in StageKind}
        return {name: value for name, value in found.items() if value}


def ended(stages: tuple[Stage, ...] = (), **fields: object) -> AnswerEnd:
    end = AnswerEnd(7.0, 3.0, "stop", num_prompt_tokens=100, num_cached_tokens=64, num_output_tokens=5, stages=stages)
    return end._replace(**fields)


@pytest.mark.parametrize(
    ("stages", "phases"),
    [
        ((), Phases(0, 0, 0)),
        (PLAIN, Phases(2_250_000_000, 750_000_000, 4 * S)),
        (PREEMPTED, Phases(S, S, 5 * S)),
        (FORK, Phases(2 * S, 0, 3 * S)),
        (life((K.QUEUED, 0), (K.POOL_FULL, 1), (K.POOL_FULL, 4)), Phases(4 * S, 0, 0)),  # it never came to run
        (life((K.QUEUED, 0), (K.PREFILL, 1), (K.PREFILL, 4)), Phases(S, 3 * S, 0)),
    ],
)
def test_a_life_has_three_phases_which_are_all_of_it(stages: tuple[Stage, ...], phases: Phases) -> None:
    found = phases_of(stages)
    assert found == phases
    whole_ns = stages[-1].end_ns - stages[0].start_ns if stages else 0
    assert found.queue_ns + found.inference_ns == whole_ns


@pytest.mark.parametrize("seed", range(50))
def test_sums_by_kind_are_those_of_the_causes_that_are_told(seed: int) -> None:
    random = Random(seed)
    kinds = [random.choice(list(StageKind)) for _ in range(12)]
    stages = [Stage(kind, at * S, at * S + random.choice((0, S))) for at, kind in enumerate(kinds)]
    told: Counter[StageKind] = Counter()
    for cause in causes_of(stages):
        told[cause.kind] += cause.length_ns
    assert +Counter(ns_by_kind(stages)) == +told


def test_an_answer_that_ended_well() -> None:
    world = World()
    world.metrics.finished("a", ended(PLAIN))
    sums = {
        "e2e_request_latency": 7,
        "request_queue_time": 2.25,
        "request_prefill_time": 0.75,
        "request_decode_time": 4,
        "request_inference_time": 4.75,
        "request_time_per_output_token": 1,
    }
    for name, seconds in sums.items():
        assert world.value(f"vllm:{name}_seconds_sum") == seconds, name
        assert world.value(f"vllm:{name}_seconds_count") == 1, name
    assert world.value("vllm:request_prompt_tokens_sum") == 100
    assert world.value("vllm:request_generation_tokens_sum") == 5
    assert world.value("vllm:prompt_tokens_cached_total") == 64
    assert world.value("vllm:generation_tokens_total") == 5
    assert world.value("vllm:request_success_total", finished_reason="stop") == 1


def test_of_one_token_or_of_what_was_not_seen_nothing_is_made_up() -> None:
    world = World()
    world.metrics.finished("a", ended(num_output_tokens=1))
    world.metrics.finished("a", ended(first_s=0.0))
    assert world.value("vllm:request_time_per_output_token_seconds_count") == 0
    assert world.value("vllm:request_queue_time_seconds_count") == 0
    assert world.value("vllm:e2e_request_latency_seconds_count") == 2


def test_time_is_counted_by_cause_and_what_a_loss_cost_is_the_losss() -> None:
    world = World()
    world.metrics.lived("a", PLAIN)
    assert world.spent() == {"queued": 0.5, "pool_full": 1.5, "acquire": 0.25, "prefill": 0.75, "decode": 4}
    world = World()
    world.metrics.lived("a", PREEMPTED)
    assert world.spent() == {"queued": 1, "prefill": 1, "decode": 2, "preempted": 3}


def test_all_kinds_of_stages_can_be_counted() -> None:
    world = World()
    for kind in StageKind:
        world.metrics.lived("a", (Stage(kind, 0, S), Stage(K.DECODE, S, 2 * S)))
    assert set(world.spent()) == {kind.value for kind in StageKind}


def test_all_series_of_a_tenant_begin_at_zero_with_its_first_call() -> None:
    world = World()
    assert world.value("vllm:generation_tokens_total") is None
    world.metrics.moved("a")
    for name in (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:request_queue_time_seconds_count",
    ):
        assert world.value(name) == 0, name
    for code in FAILURE_CODES:
        assert world.value("coppice_requests_failed_total", code=code) == 0
    for reason in FINISH_REASONS:
        assert world.value("vllm:request_success_total", finished_reason=reason) == 0
    for kind in StageKind:
        assert world.value(SPENT, cause=kind.value) == 0


def test_a_code_that_nobody_knew_is_counted_all_the_same() -> None:
    world = World()
    world.metrics.failed("a", "quite_new", 3)
    assert world.value("coppice_requests_failed_total", code="quite_new") == 1
    assert world.value("vllm:generation_tokens_total") == 3
