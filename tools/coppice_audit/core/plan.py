"""Which trials an audit makes, in which order, and the prompts that nobody has sent before.

A trial is one prompt that is sent first, and what the attacker sends right after it and measures. Arms that are
compared differ in one thing only: whether the measured prompt is the one that was sent first.

    arm                  sent first     then measured, by the attacker
    OWN_HIT              own prompt     the same                             positive control
    OWN_MISS             own prompt     a new one
    NOISE_A, NOISE_B     the victim's   a new one                            negative control
    VICTIM_HIT           the victim's   the same                             claim; metadata
    VICTIM_MISS          the victim's   a new one
    ERROR_HIT            the victim's   the same, in a request with a fault  error texts
    ERROR_MISS           the victim's   a new one, likewise
    ORDER_OWN            own prompt     the same among new ones, at once     control of the order
    ORDER_VICTIM         the victim's   the same among new ones, at once     order
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np

NUM_GUESSES = 8  # prompts that are sent at once in a trial of the order, one of them sent before
_CONTROLS_SHARE = 8  # one control for so many samples of the claim
_ORDER_SHARE = 20
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD_LETTERS = 5


class Arm(StrEnum):
    OWN_HIT = "own again"
    OWN_MISS = "own new"
    NOISE_A = "new, first half"
    NOISE_B = "new, second half"
    VICTIM_HIT = "victim's"
    VICTIM_MISS = "never sent"
    ERROR_HIT = "victim's, faulty"
    ERROR_MISS = "never sent, faulty"
    ORDER_OWN = "own among new"
    ORDER_VICTIM = "victim's among new"

    @property
    def begins_with_own(self) -> bool:
        return self in (Arm.OWN_HIT, Arm.OWN_MISS, Arm.ORDER_OWN)

    @property
    def repeats(self) -> bool:
        return self in (Arm.OWN_HIT, Arm.VICTIM_HIT, Arm.ERROR_HIT)

    @property
    def is_faulty(self) -> bool:
        return self in (Arm.ERROR_HIT, Arm.ERROR_MISS)

    @property
    def is_order(self) -> bool:
        return self in (Arm.ORDER_OWN, Arm.ORDER_VICTIM)


def num_trials(arm: Arm, samples: int) -> int:
    """Of one arm, when the claim has `samples` for each of its two."""
    if arm in (Arm.VICTIM_HIT, Arm.VICTIM_MISS):
        return samples
    return max(1, samples // (_ORDER_SHARE if arm.is_order else _CONTROLS_SHARE))


def plan_trials(samples: int, seed: int) -> list[Arm]:
    """All trials in random order, so that whatever drifts while they run meets all arms alike."""
    trials = [arm for arm in Arm for _ in range(num_trials(arm, samples))]
    places = np.random.default_rng((seed, 0)).permutation(len(trials))
    return [trials[place] for place in places]


def prompts(seed: int, num_words: int) -> Iterator[str]:
    """Prompts of words of random letters, without end. No two begin alike beyond chance, and none is repeated."""
    source = np.random.default_rng((seed, 1))
    letters = np.array(list(_LETTERS))
    while True:
        drawn = letters[source.integers(len(_LETTERS), size=(num_words, _WORD_LETTERS))]
        yield " ".join("".join(word) for word in drawn)
