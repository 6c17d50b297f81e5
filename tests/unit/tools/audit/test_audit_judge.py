"""Whole audits in virtual time: each leak is found, nothing is found where nothing is, and who sees nothing says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coppice_audit.core.judge import Check, Verdict, judge, verdict_of
from coppice_audit.core.plan import NUM_GUESSES, Arm, num_trials, plan_trials, prompts
from coppice_audit.core.samples import Reading, Sample, Samples
from coppice_audit.options import AuditOptions
from coppice_audit.run import measure
from tests.fakes.tools.audited import ATTACKER, VICTIM, AuditedServer

SAMPLES = 2000
REFUSED = Reading(1.0, 0.0, {"status": "429"}, "429: slow down", retry_s=0.0)
BROKEN = Reading(1.0, 0.0, {"status": "500"}, "500: broken")


def audited(server: AuditedServer, *, samples: int = SAMPLES, seed: int = 3) -> Samples:
    options = AuditOptions(base_url="", victim_key=VICTIM, attacker_key=ATTACKER, samples=samples)
    found = Samples()
    asyncio.run(measure(server, options, seed, 4, found))
    return found


def by_name(samples: Samples) -> dict[str, Check]:
    return {check.name: check for check in judge(samples)}


@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_tells_nothing_is_isolated(seed: int) -> None:
    samples = audited(AuditedServer(seed), seed=seed)
    checks = judge(samples)
    assert verdict_of(checks) is Verdict.ISOLATED, checks
    assert [check.name for check in checks] == (
        ["positive control", "negative control", "times", "order", "answers", "errors"]
    )
    assert samples.num_trials == len(plan_trials(SAMPLES, seed))
    own = by_name(samples)["positive control"].numbers
    assert own["auc"] > 0.99
    assert own["reported_cached_share"] == 1.0


@pytest.mark.parametrize(
    ("leak", "where"),
    [
        ("time", ["times"]),
        ("cached_tokens", ["answers"]),
        ("header", ["answers"]),
        ("number", ["answers"]),
        ("id", ["answers"]),
        ("error", ["errors"]),
    ],
)
def test_each_leak_is_found_where_it_is(leak: str, where: list[str]) -> None:
    samples = audited(AuditedServer(5, leak))
    checks = judge(samples)
    assert [check.name for check in checks if check.verdict is Verdict.LEAK] == where, checks
    assert verdict_of(checks) is Verdict.LEAK


def test_a_prompt_that_is_answered_before_others_tells() -> None:
    """Of a scheduler that takes what is cached first, although each alone takes as long."""
    samples = Samples(places={Arm.ORDER_OWN: [0] * 40, Arm.ORDER_VICTIM: [0, 1] * 20})
    assert by_name(samples)["order"].verdict is Verdict.LEAK
    samples.places[Arm.ORDER_VICTIM] = list(range(NUM_GUESSES)) * 5
    assert by_name(samples)["order"].verdict is Verdict.ISOLATED
    samples.places[Arm.ORDER_VICTIM] = [0] * 30
    assert by_name(samples)["order"].verdict is Verdict.INCONCLUSIVE


def test_what_tells_is_named() -> None:
    assert by_name(audited(AuditedServer(5, "header")))["answers"].numbers["least"] == "header x-cache"
    assert "id as the victim's tells: yes against no" in by_name(audited(AuditedServer(5, "id")))["answers"].seen
    assert "were reported as cached" in by_name(audited(AuditedServer(5, "cached_tokens")))["answers"].seen


def test_many_facts_are_no_better_than_one() -> None:
    """Of twenty facts that tell nothing, one is rare by chance in most audits; the p of all of them is not."""
    random = np.random.default_rng(4)
    least = []
    for _ in range(100):
        told = [{f"fact {n}": str(word) for n, word in enumerate(random.integers(3, size=20))} for _ in range(80)]
        arms = [Arm.VICTIM_HIT, Arm.VICTIM_MISS] * 40
        samples = Samples([Sample(arm, 0.0, 1.0, facts) for arm, facts in zip(arms, told, strict=True)])
        least.append(by_name(samples)["answers"].numbers["p"])
    assert sum(p <= 0.05 for p in least) / len(least) < 0.1
    assert sum(p <= 0.5 for p in least) / len(least) > 0.15, "and it is no constant"


def test_a_leak_that_is_certain_ends_the_audit() -> None:
    samples = audited(AuditedServer(6, "time"))
    assert samples.num_trials < len(plan_trials(SAMPLES, 3)) / 4
    assert by_name(samples)["times"].is_certain


def test_without_a_cache_nothing_can_be_said() -> None:
    checks = by_name(audited(AuditedServer(7, finds=False), samples=200))
    assert checks["positive control"].verdict is Verdict.INCONCLUSIVE
    assert "cannot be told by time" in checks["positive control"].seen
    assert verdict_of(list(checks.values())) is Verdict.INCONCLUSIVE


def test_few_samples_are_too_few() -> None:
    checks = by_name(audited(AuditedServer(8), samples=100))
    assert checks["times"].verdict is Verdict.INCONCLUSIVE
    assert "more samples" in checks["times"].seen
    assert checks["order"].verdict is Verdict.INCONCLUSIVE
    assert verdict_of(list(checks.values())) is Verdict.INCONCLUSIVE


def test_a_bias_of_the_measurement_is_no_leak() -> None:
    """New prompts differ from new prompts, and so do the victim's: the times say nothing."""
    samples = audited(AuditedServer(9), samples=800)
    faster = [
        replace(sample, ttft_ms=sample.ttft_ms - 3) if sample.arm in (Arm.NOISE_A, Arm.VICTIM_HIT) else sample
        for sample in samples.measured
    ]
    biased = Samples(faster, samples.places)
    checks = by_name(biased)
    assert checks["negative control"].verdict is checks["times"].verdict is Verdict.INCONCLUSIVE
    assert verdict_of(list(checks.values())) is Verdict.INCONCLUSIVE


def test_prompts_of_an_audit_before_are_no_new_ones() -> None:
    server = AuditedServer(10)
    audited(server, samples=200)
    checks = by_name(audited(server, samples=200))
    assert checks["positive control"].verdict is Verdict.INCONCLUSIVE
    assert "another seed" in checks["positive control"].seen


def test_a_refused_request_is_sent_again_and_a_failed_trial_is_left_out() -> None:
    server = AuditedServer(11)
    server.refusals = {0: REFUSED, 1: REFUSED, 40: BROKEN}
    samples = audited(server, samples=200)
    assert samples.num_trials == len(plan_trials(200, 3)) - 1
    assert samples.failures == {"500: broken": 1}


def test_a_server_that_goes_away_ends_the_audit_with_what_there_is() -> None:
    server = AuditedServer(12)
    server.refusals = dict.fromkeys(range(300, 10_000), BROKEN)
    samples = audited(server)
    checks = by_name(samples)
    assert 50 < samples.num_trials < 300
    assert "the last 8 trials failed: 500: broken" in checks["trials"].seen
    assert verdict_of(list(checks.values())) is Verdict.INCONCLUSIVE


def test_many_failures_are_no_audit() -> None:
    server = AuditedServer(13)
    server.refusals = dict.fromkeys(range(0, 3_000, 12), BROKEN)
    checks = by_name(audited(server, samples=200))
    assert checks["trials"].verdict is Verdict.INCONCLUSIVE
    assert "500: broken" in checks["trials"].seen


def test_a_plan_is_of_its_seed_and_mixes_all_arms() -> None:
    trials = plan_trials(SAMPLES, 1)
    assert trials == plan_trials(SAMPLES, 1) != plan_trials(SAMPLES, 2)
    assert Counter(trials) == {arm: num_trials(arm, SAMPLES) for arm in Arm}
    assert num_trials(Arm.VICTIM_HIT, SAMPLES) == 2000
    assert num_trials(Arm.OWN_HIT, SAMPLES) == 250
    assert set(trials[:200]) == set(Arm)


def test_prompts_never_come_again() -> None:
    source = prompts(1, 12)
    found = [next(source) for _ in range(3000)]
    assert len({prompt[:11] for prompt in found}) == 3000
    assert all(len(prompt.split()) == 12 for prompt in found)
    assert next(prompts(1, 12)) == found[0] != next(prompts(2, 12))


def test_places_of_a_prompt_among_others_are_counted_from_the_first_answer() -> None:
    samples = audited(AuditedServer(14), samples=400)
    assert set(samples.places[Arm.ORDER_OWN]) == {0}, "the own prompt is found, and answered first"
    assert len(samples.places[Arm.ORDER_VICTIM]) == num_trials(Arm.ORDER_VICTIM, 400)
    assert max(samples.places[Arm.ORDER_VICTIM]) < NUM_GUESSES
