"""When is a run of blocks used again? A survival model in discrete time, learned online from one domain's own accesses.

    age, in blocks that the domain used since     0 ... low | low+1 | low+2 | ... | last        half-octave buckets
    P(used again in bucket b | not before)        sigmoid(hazard[b] + weights of the features at the last access)
    gain(level, b) = max over j >= b of (expected uses in b..j) / (expected block-time in b..j)

The gain is the best rate of hits per block and time that keeping a run of this age can still yield; the run with the
lowest goes first. With equal hazards in all buckets it falls with age, so an untaught model is LRU by access count. Age
is counted in blocks used rather than seconds, so that neither the rate of arrivals nor a coarse clock matters. Ages far
below what the cache can hold are one bucket, for no decision depends on them.

Features are few: how often the run was used; how much of the request that used it last was new, and whether the run
was used before, is new, or is new after a run that itself is rarely used, so that a conversation goes on and is not
begun; what the client said, by the kind of its call; and whether the answer called tools. So the model learns how
often prompts of each kind come again, and how far the client's word can be trusted there. Logistic loss, weighted by
blocks; AdaGrad (Duchi, Hazan, Singer 2011), steps of 0.1, and a moving mean of what it arrives at. The prior says
that frequent use is a good sign, and believes the client.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from math import exp, log, sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coppice.messages.reuse import CALL_KINDS

NUM_BUCKETS: Final = 48  # of all ages, up to 16 million blocks
USED, BEGUN, CONTINUED = 0, 1, 2  # accesses; see `features`
COMMON_USES: Final = 20  # what hangs below a run that was used more often begins something
WINDOW: Final = 20  # buckets that are told apart, from 1/16 of what is cached to 32 times as much
NUM_LEVELS: Final = 32
NUM_CELLS: Final = NUM_BUCKETS * NUM_LEVELS

_SPAN = 4.0  # scores are cut to -4 .. 4
_STEP = 0.1
_TAKEN_SHARE = 0.2  # single lessons are noisy
_SMALL = 1e-8
_PRIOR_HAZARD = log(0.1 / 0.9)
_EDGES = tuple(int(2.0 ** (half / 2) + 0.5) for half in range(1, NUM_BUCKETS))  # upper ends; the last bucket has none
_WIDTHS = np.diff(np.array([0, *_EDGES, 2 * _EDGES[-1]], dtype=float))

_USES = (0, 1, 2, 3, 4, 4, 5, 5, 5, 5, *([6] * 11))  # class by number of accesses; 7 above 20
_USES_PRIOR = (0.0, 0.0, 1.0, 1.6, 2.2, 3.0, 4.0, 5.0)
_NEW_CLASSES = 24  # log2 of the number of new blocks
_HINT_PRIOR = (0.0, 1.4, -1.4)  # unknown, likely, unlikely: right four times in five, log(0.8 / 0.2)
_NEW_AT = len(_USES_PRIOR)
_HINT_AT = _NEW_AT + 3 * _NEW_CLASSES
_NUM_HINTS = CALL_KINDS * len(_HINT_PRIOR)
_OUTCOME_PRIOR = (0.0, 1.4, 0.0)  # unknown, called tools, called none: results of tools come back four times in five
_NUM_WEIGHTS = _HINT_AT + len(_OUTCOME_PRIOR) * _NUM_HINTS
_PRIOR_HAZARDS = [_PRIOR_HAZARD] * NUM_BUCKETS
_HINTS_PRIOR = CALL_KINDS * _HINT_PRIOR
_PRIOR = [
    *(*_USES_PRIOR, *([0.0] * (3 * _NEW_CLASSES))),
    *(weight + outcome for outcome in _OUTCOME_PRIOR for weight in _HINTS_PRIOR),
]

Features = tuple[int, int, int]  # places in the table of weights


class Ranking(NamedTuple):
    """The cells (bucket * NUM_LEVELS + level) in the order of eviction. Nobody writes to it."""

    rank: list[int]  # by cell
    cell: list[int]  # by rank


def bucket_of(age: int) -> int:
    return bisect_right(_EDGES, age)


def buckets_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.searchsorted(_EDGES, ages, side="right")
    return found


def end_of(bucket: int) -> int:
    """The age at which this bucket is left. The last one never is."""
    return _EDGES[bucket]


def features(uses: int, new_blocks: int, *, access: int, hint: int, call_kind: int, outcome: int = 0) -> Features:
    """`uses` counts the present one; `access` is USED, BEGUN or CONTINUED; `hint` is 0 for unknown, 1 likely, 2
    unlikely, and `call_kind`, below CALL_KINDS, that of the call that said it; `outcome` of the answer is 0 where it
    is unknown, 1 where it called tools and 2 where it could have."""
    used = _USES[uses] if uses < len(_USES) else 7
    extent = min(new_blocks.bit_length(), _NEW_CLASSES - 1)
    said = _HINT_AT + len(_HINT_PRIOR) * call_kind + hint + _NUM_HINTS * outcome
    return used, _NEW_AT + extent + _NEW_CLASSES * access, said


class HazardModel:
    """What one domain's past teaches."""

    __slots__ = ("_hazards", "_steps", "_taken_hazards", "_taken_weights", "_taught", "_weights", "low", "top")

    def __init__(self) -> None:
        self.low = 0  # ages below the end of this bucket are not told apart, nor are those in `top` and after it
        self.top = WINDOW - 1
        # Shared until the first lesson: most domains are small and never learn anything.
        self._hazards = _PRIOR_HAZARDS
        self._weights = _PRIOR
        self._taught: list[float] = []  # sums of squared gradients, by bucket and by weight
        self._steps: list[float] = []
        self._taken_hazards = self._hazards  # decisions follow means over the last lessons
        self._taken_weights = self._weights

    def fit_window(self, num_cached: int) -> None:
        self.low = min(bucket_of(num_cached // 16), NUM_BUCKETS - WINDOW)
        self.top = self.low + WINDOW - 1

    def level(self, seen: Features) -> int:
        """The score in steps; higher is used sooner."""
        weights = self._taken_weights
        score = weights[seen[0]] + weights[seen[1]] + weights[seen[2]]
        level = int((score + _SPAN) * (NUM_LEVELS / (2 * _SPAN)))
        return 0 if level < 0 else min(level, NUM_LEVELS - 1)

    def _begin(self) -> None:
        self._hazards, self._weights = self._hazards.copy(), self._weights.copy()
        self._taught, self._steps = [0.0] * NUM_BUCKETS, [0.0] * _NUM_WEIGHTS

    def learn(self, seen: Features, bucket: int, num_blocks: int, *, was_used: bool) -> None:
        """A run of this many blocks was used in this bucket of age, or got through it without."""
        if not self._steps:
            self._begin()
        weights, steps = self._weights, self._steps
        score = self._hazards[bucket] + weights[seen[0]] + weights[seen[1]] + weights[seen[2]]
        gradient = num_blocks * (1.0 / (1.0 + exp(-max(-30.0, score))) - was_used)
        square = gradient * gradient
        self._taught[bucket] += square
        self._hazards[bucket] -= _STEP * gradient / sqrt(self._taught[bucket] + _SMALL)
        for place in seen:
            steps[place] += square
            weights[place] -= _STEP * gradient / sqrt(steps[place] + _SMALL)

    def take_over(self) -> None:
        """Decisions follow a part of what was learned since the last time."""
        if self._steps:
            self._taken_hazards = _nearer(self._taken_hazards, self._hazards)
            self._taken_weights = _nearer(self._taken_weights, self._weights)

    def ranking(self) -> Ranking:
        return _rank(self._taken_hazards, self.low, self.top)


def _nearer(taken: list[float], learned: list[float]) -> list[float]:
    return [old + _TAKEN_SHARE * (new - old) for old, new in zip(taken, learned, strict=True)]


@cache
def untaught_ranking() -> Ranking:
    """Of a model that has learned nothing; shared by all of them."""
    return _rank(_PRIOR_HAZARDS, 0, NUM_BUCKETS - 1)


@cache
def age_ranking() -> Ranking:
    """Older buckets first, whatever the level; the cells of a bucket stand side by side."""
    cells = [bucket * NUM_LEVELS + level for bucket in range(NUM_BUCKETS - 1, -1, -1) for level in range(NUM_LEVELS)]
    ranks = [(NUM_BUCKETS - 1 - cell // NUM_LEVELS) * NUM_LEVELS + cell % NUM_LEVELS for cell in range(NUM_CELLS)]
    return Ranking(ranks, cells)


def _rank(hazards: list[float], low: int, top: int) -> Ranking:
    """Cells of equal gain stand older first. Buckets outside of low..top count as the nearest inside."""
    base = np.array(hazards[low : top + 1])
    widths = _WIDTHS[low : top + 1].copy()
    widths[0] = _WIDTHS[: low + 1].sum()
    scores = (np.arange(NUM_LEVELS) + 0.5) * (2 * _SPAN / NUM_LEVELS) - _SPAN
    used = 1.0 / (1.0 + np.exp(-(scores[:, None] + base)))
    alive = np.cumprod(np.concatenate([np.ones((NUM_LEVELS, 1)), 1.0 - used[:, :-1]], axis=1), axis=1)
    zero = np.zeros((NUM_LEVELS, 1))
    hits = np.concatenate([zero, np.cumsum(alive * used, axis=1)], axis=1)
    time = np.concatenate([zero, np.cumsum(alive * widths * (1.0 - used / 2), axis=1)], axis=1)
    # Survival up to b divides both sums, so the ratio from b to j is a slope between two points of the curve.
    rise = hits[:, None, 1:] - hits[:, :-1, None]
    run = time[:, None, 1:] - time[:, :-1, None]
    gains = np.divide(rise, run, out=np.zeros_like(rise), where=run > 0).max(axis=2)
    buckets = np.clip(np.arange(NUM_BUCKETS), low, top) - low
    by_cell = gains.T[buckets].ravel()
    order = np.lexsort((-np.repeat(np.arange(NUM_BUCKETS), NUM_LEVELS), by_cell))
    ranks = np.empty(NUM_CELLS, dtype=np.int64)
    ranks[order] = np.arange(NUM_CELLS)
    return Ranking(ranks.tolist(), order.tolist())
