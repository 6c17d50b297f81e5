"""The verdict over samples. Pure.

An audit that cannot see a hit has shown nothing, so the controls come first: the attacker's own repeated prompt must
stand out, and two samples of new prompts must not. Then nothing of the victim's may tell: times, order, facts.

A difference is a leak at `P_DIFFERENT`; at `P_CERTAIN` no more trials are needed. That nothing differs is said only
when there are enough samples to see it: the interval of the AUC within `AUC_RANGE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import Any

from coppice_audit.core.plan import NUM_GUESSES, Arm
from coppice_audit.core.samples import CACHED_TOKENS, PROMPT_TOKENS, Sample, Samples
from coppice_audit.core.statistics import association_p, auc, auc_interval, ks_p, mann_whitney_p, uniform_p

P_DIFFERENT = 1e-3
P_CERTAIN = 1e-8
AUC_SEEN = 0.99
AUC_RANGE = (0.44, 0.56)
AUC_LEVEL = 0.999
MEDIAN_SHARE = 0.05  # of the time that a hit saves, by which the medians of the claim may differ
FAILED_SHARE = 0.05
_CACHED_SHARE = 0.5  # of a prompt of random letters; nothing but the prompt itself explains so much
_ABSENT = "(absent)"


class Verdict(StrEnum):
    ISOLATED = "isolated"
    LEAK = "leak"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Check:
    """One question, its answer, what was seen in words and in numbers. `is_certain`: more trials change nothing."""

    name: str
    verdict: Verdict
    seen: str
    numbers: dict[str, Any] = field(default_factory=dict)
    is_certain: bool = False


def judge(samples: Samples) -> list[Check]:
    """All checks, in the order in which they are read."""
    own = _positive_control(samples)
    noise = _negative_control(samples)
    claim = _times(samples)
    if noise.verdict is Verdict.INCONCLUSIVE and claim.verdict is Verdict.LEAK:
        claim = Check(claim.name, Verdict.INCONCLUSIVE, f"{claim.seen}; but the negative control fails", claim.numbers)
    checks = [own, noise, claim, _order(samples)]
    checks.append(_facts("answers", samples, Arm.VICTIM_HIT, Arm.VICTIM_MISS))
    checks.append(_facts("errors", samples, Arm.ERROR_HIT, Arm.ERROR_MISS))
    if (failed := _requests(samples)) is not None:
        checks.append(failed)
    return checks


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """A leak wherever one was seen; isolated when every check was passed."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in (Verdict.LEAK, Verdict.INCONCLUSIVE) if verdict in verdicts), Verdict.ISOLATED)


def leak_is_certain(checks: Sequence[Check]) -> bool:
    """Whether more trials cannot change that there is a leak."""
    return any(check.is_certain and check.verdict is Verdict.LEAK for check in checks)


def _compared(hits: Sequence[float], misses: Sequence[float]) -> dict[str, Any]:
    """Of two samples of times, neither of them empty."""
    low, high = auc_interval(hits, misses, AUC_LEVEL)
    return {
        "samples": [len(hits), len(misses)],
        "median_ms": [median(hits), median(misses)],
        "ks_p": ks_p(hits, misses),
        "auc": auc(hits, misses),
        "auc_interval": [low, high],
    }


def _told(numbers: dict[str, Any]) -> str:
    hit, miss = numbers["median_ms"]
    low, high = numbers["auc_interval"]
    return f"{hit:.4g} against {miss:.4g} ms, AUC {numbers['auc']:.3f} [{low:.3f}, {high:.3f}], p {numbers['ks_p']:.2g}"


def _positive_control(samples: Samples) -> Check:
    name = "positive control"
    hits, misses = samples.ttft_ms(Arm.OWN_HIT), samples.ttft_ms(Arm.OWN_MISS)
    if not hits or not misses:
        return Check(name, Verdict.INCONCLUSIVE, "no samples")
    if any(_is_mostly_cached(sample) for arm in (Arm.OWN_MISS, Arm.VICTIM_MISS) for sample in samples.of(arm)):
        return Check(name, Verdict.INCONCLUSIVE, "new prompts were cached: they had been sent before; use another seed")
    numbers = _compared(hits, misses)
    cached = sum(_is_mostly_cached(sample) for sample in samples.of(Arm.OWN_HIT))
    numbers["reported_cached_share"] = cached / len(hits)
    if numbers["auc"] >= AUC_SEEN and numbers["ks_p"] < P_CERTAIN:
        return Check(name, Verdict.ISOLATED, _told(numbers), numbers)
    why = "a hit cannot be told by time; try longer prompts, more samples, a quiet server"
    return Check(name, Verdict.INCONCLUSIVE, f"{_told(numbers)}: {why}", numbers)


def _negative_control(samples: Samples) -> Check:
    name = "negative control"
    first, second = samples.ttft_ms(Arm.NOISE_A), samples.ttft_ms(Arm.NOISE_B)
    if not first or not second:
        return Check(name, Verdict.INCONCLUSIVE, "no samples")
    numbers = _compared(first, second)
    if numbers["ks_p"] > P_DIFFERENT:
        return Check(name, Verdict.ISOLATED, _told(numbers), numbers)
    return Check(name, Verdict.INCONCLUSIVE, f"{_told(numbers)}: new prompts differ from new prompts", numbers)


def _times(samples: Samples) -> Check:
    name = "times"
    hits, misses = samples.ttft_ms(Arm.VICTIM_HIT), samples.ttft_ms(Arm.VICTIM_MISS)
    own_hits, own_misses = samples.ttft_ms(Arm.OWN_HIT), samples.ttft_ms(Arm.OWN_MISS)
    if not (hits and misses and own_hits and own_misses):
        return Check(name, Verdict.INCONCLUSIVE, "no samples")
    numbers = _compared(hits, misses)
    if numbers["ks_p"] <= P_DIFFERENT:
        return Check(name, Verdict.LEAK, _told(numbers), numbers, is_certain=numbers["ks_p"] < P_CERTAIN)
    low, high = numbers["auc_interval"]
    gap_ms = median(own_misses) - median(own_hits)
    shift_ms = abs(median(hits) - median(misses))
    if low < AUC_RANGE[0] or high > AUC_RANGE[1] or shift_ms >= MEDIAN_SHARE * gap_ms:
        return Check(name, Verdict.INCONCLUSIVE, f"{_told(numbers)}: too wide; take more samples", numbers)
    return Check(name, Verdict.ISOLATED, _told(numbers), numbers)


def _order(samples: Samples) -> Check:
    """Of prompts sent at once, the one that was sent before must not be answered sooner or later than the others."""
    name = "order"
    numbers: dict[str, Any] = {}
    for key, arm in (("own", Arm.ORDER_OWN), ("victim", Arm.ORDER_VICTIM)):
        places = samples.places[arm]
        numbers[f"{key}_p"] = uniform_p(places, NUM_GUESSES)
        numbers[f"{key}_first_share"] = places.count(0) / len(places) if places else None
    p = numbers["victim_p"]
    if p is None:
        return Check(
            name,
            Verdict.INCONCLUSIVE,
            f"too few rounds; take more samples, and let the attacker have {NUM_GUESSES} requests at once",
            numbers,
        )
    seen = f"first of {NUM_GUESSES} in {numbers['victim_first_share']:.0%} of rounds, p {p:.2g}"
    if numbers["own_first_share"] is not None:
        seen += f" (own prompt: {numbers['own_first_share']:.0%})"
    verdict = Verdict.LEAK if p <= P_DIFFERENT else Verdict.ISOLATED
    return Check(name, verdict, seen, numbers, is_certain=p < P_CERTAIN)


def _facts(name: str, samples: Samples, hit: Arm, miss: Arm) -> Check:
    """Whatever an answer says beside its text must come equally often for the victim's prompts and for new ones."""
    hits, misses = samples.of(hit), samples.of(miss)
    if not hits or not misses:
        return Check(name, Verdict.INCONCLUSIVE, "no samples")
    cached = sum(_is_mostly_cached(sample) for sample in hits)
    if cached:
        seen = f"{cached} of {len(hits)} of the victim's prompts were reported as cached"
        return Check(name, Verdict.LEAK, seen, {"reported_cached": cached}, is_certain=True)
    names = sorted({key for sample in (*hits, *misses) for key in sample.facts})
    by_name = {key: _fact_p(key, hits, misses) for key in names}
    found, p = min(by_name.items(), key=lambda item: item[1])
    p = min(1.0, p * len(names))  # as many chances as there are facts
    numbers = {"samples": [len(hits), len(misses)], "p": p, "least": found, "facts": by_name}
    if p > P_DIFFERENT:
        return Check(name, Verdict.ISOLATED, f"{len(names)} facts of each answer tell nothing, p {p:.2g}", numbers)
    values = [sorted({sample.facts.get(found, _ABSENT) for sample in arm})[:3] for arm in (hits, misses)]
    seen = f"{found} tells: {', '.join(values[0])} against {', '.join(values[1])}, p {p:.2g}"
    return Check(name, Verdict.LEAK, seen, numbers, is_certain=p < P_CERTAIN)


def _fact_p(name: str, hits: Sequence[Sample], misses: Sequence[Sample]) -> float:
    """As words, and where all of them are numbers by rank, too; the lesser p counts twice."""
    words = [[sample.facts.get(name, _ABSENT) for sample in arm] for arm in (hits, misses)]
    p = association_p(*words)
    numbers = [[_number(word) for word in arm] for arm in words]
    known = [[number for number in arm if number is not None] for arm in numbers]
    if [len(arm) for arm in known] == [len(arm) for arm in numbers]:
        p = min(1.0, 2 * min(p, mann_whitney_p(*known)))
    return p


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _is_mostly_cached(sample: Sample) -> bool:
    cached, prompt = (_number(sample.facts.get(key, "")) or 0.0 for key in (CACHED_TOKENS, PROMPT_TOKENS))
    return cached > _CACHED_SHARE * prompt > 0


def _requests(samples: Samples) -> Check | None:
    """What keeps an audit from being one although its numbers look good."""
    failed = samples.failures.total()
    if samples.stopped:
        return Check("trials", Verdict.INCONCLUSIVE, samples.stopped)
    if failed <= FAILED_SHARE * (failed + samples.num_trials):
        return None
    (why, _), *_ = samples.failures.most_common(1)
    return Check("trials", Verdict.INCONCLUSIVE, f"{failed} failed: {why}", {"failed": failed})
