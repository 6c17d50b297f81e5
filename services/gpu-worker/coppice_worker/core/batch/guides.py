"""Rows whose tokens must follow a grammar: a guide for each sequence says which tokens may come next.

    step       the device computes hidden states ---------> logits -> masked -> tokens
               meanwhile: each guide takes the tokens that   ^
               its sequence got, and fills its mask ---------'

The core keeps guides and hands them on with the rows. Whoever computes the step asks them, on whichever thread it
likes, before it gives the step's tokens back: so a guide always knows all tokens of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coppice.ids import DomainId

WORD_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)

UInt32 = npt.NDArray[np.uint32]


class Guide(Protocol):
    """Of one sequence."""

    @property
    def is_ready(self) -> bool:
        """Its grammar is compiled, or cannot be. Until then it is not asked; afterwards it always is ready."""

    def fill(self, output: UInt32, words: UInt32) -> bool:
        """Which tokens may follow `output`, all output of the sequence so far: bit t % 32 of word t // 32 of words [W]
        for token t.

        False: this cannot be told any more, and the words mean nothing.
        """


# Of a sequence's domain, its grammar, and the id of its request for the log. Nothing that was compiled for one domain
# serves another.
OpenGuide = Callable[[DomainId, str, str], Guide]

LOCAL = {"is_local": True}  # metadata of fields that stay in this process


@dataclass(frozen=True, slots=True)
class Guided:
    """G of the R rows that need a token. On ranks that follow they have no guides, and tokens that nobody uses."""

    rows: npt.NDArray[np.int32]  # [G] of R
    guides: tuple[Guide, ...] = field(default=(), metadata=LOCAL)  # [G]
    outputs: tuple[UInt32, ...] = field(default=(), metadata=LOCAL)  # [G] arrays: output so far


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens guided rows may not take."""

    rows: npt.NDArray[np.int32]  # [G] of R
    forbidden: npt.NDArray[np.bool_]  # [G, vocab]; nothing is forbidden to a row that is broken
    broken: npt.NDArray[np.bool_]  # [G] their guides know no token any more


def fill_masks(guided: Guided, vocab_size: int) -> Masks:
    """Asks all guides."""
    count = len(guided.guides)
    words = np.empty((count, -(-vocab_size // WORD_BITS)), np.uint32)
    asked = zip(guided.guides, guided.outputs, words, strict=True)
    broken = np.array([not guide.fill(output, row) for guide, output, row in asked], np.bool_)
    words[broken] = _ALL
    bits = np.unpackbits((~words).astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
    return Masks(guided.rows[:count], bits[:, :vocab_size].view(np.bool_), broken)
