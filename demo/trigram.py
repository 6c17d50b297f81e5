"""The yardstick: an interpolated Kneser-Ney trigram over the same tokens that the model reads.

    P3(w | u v) = max(c(uvw) - D3, 0) / c(uv)     + D3 * kinds(uv.) / c(uv)     * P2(w | v)
    P2(w | v)   = max(k(.vw) - D2, 0) / k(.v.)    + D2 * kinds(v.)  / k(.v.)    * P1(w)
    P1(w)       = max(k(.w)  - D1, 0) / k(..)     + D1 * kinds(.)   / k(..)     * 1 / vocabulary

c counts occurrences; k counts distinct predecessors, which is what makes it Kneser-Ney. The discounts are
D = n1 / (n1 + 2 n2) with n1 and n2 the numbers of entries counted once and twice (Ney, Essen and Kneser, 1994).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence


class Trigram:
    """Trained on sequences of token ids; each is read as if two `start` tokens stood before it."""

    def __init__(self, sequences: Iterable[Sequence[int]], *, vocabulary: int, start: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        trigrams: Counter[tuple[int, int, int]] = Counter()
        for sequence in sequences:
            padded = [start, start, *sequence]
            trigrams.update(zip(padded, padded[1:], padded[2:], strict=False))
        bigrams = Counter((v, w) for _, v, w in trigrams)
        unigrams = Counter(w for _, w in bigrams)
        self._entries = (unigrams, bigrams, trigrams)
        self._discounts = tuple(_discount(entries) for entries in self._entries)
        self._totals3: Counter[tuple[int, int]] = Counter()
        self._kinds3: Counter[tuple[int, int]] = Counter()
        for (u, v, _), count in trigrams.items():
            self._totals3[u, v] += count
            self._kinds3[u, v] += 1
        self._totals2: Counter[int] = Counter()
        self._kinds2: Counter[int] = Counter()
        for (v, _), count in bigrams.items():
            self._totals2[v] += count
            self._kinds2[v] += 1
        self._total1 = unigrams.total()

    def probability(self, u: int, v: int, w: int) -> float:
        """P(w | u v); sums to 1 over the vocabulary for every u and v."""
        unigrams, bigrams, trigrams = self._entries
        d1, d2, d3 = self._discounts
        chance = (max(unigrams[w] - d1, 0.0) + d1 * len(unigrams) / self._vocabulary) / self._total1
        if total := self._totals2[v]:
            chance = (max(bigrams[v, w] - d2, 0.0) + d2 * self._kinds2[v] * chance) / total
        if total := self._totals3[u, v]:
            chance = (max(trigrams[u, v, w] - d3, 0.0) + d3 * self._kinds3[u, v] * chance) / total
        return chance

    def bits(self, sequence: Sequence[int]) -> list[float]:
        """Bits spent on each token of `sequence`."""
        padded = [self._start, self._start, *sequence]
        return [-math.log2(self.probability(*window)) for window in zip(padded, padded[1:], padded[2:], strict=False)]


def _discount(entries: Counter[int] | Counter[tuple[int, int]] | Counter[tuple[int, int, int]]) -> float:
    once = sum(count == 1 for count in entries.values())
    twice = sum(count == 2 for count in entries.values())
    return once / (once + 2 * twice) if once else 0.5
