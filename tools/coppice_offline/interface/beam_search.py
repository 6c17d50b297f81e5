"""How to search the likeliest continuations: what a user of `LLM.beam_search` can ask for, checked when it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from coppice.messages.sampling import BEAMS_MAX, LENGTH_PENALTY, Range
from coppice_offline.interface import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOptions:
    """Options of one prompt's beam search. Raises UsageError."""

    beam_width: int
    n: int | None = None  # answers that are told, best first; None: as many as beams
    max_tokens: int | None = None  # None: 16
    length_penalty: float = (
        1.0  # a score is divided by the length to the power of it: above 0 longer answers are better
    )
    ignore_eos: bool = False
    stop_token_ids: Collection[int] | None = ()

    def __post_init__(self) -> None:
        for name, allowed in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name == "beam_width":
                self._set(name, checks.integer(name, value, allowed))
        if self.num_answers > self.beam_width:
            raise checks.wrong("n", self.n, f"an integer from 1 to beam_width, which is {self.beam_width}")
        self._set("length_penalty", checks.number("length_penalty", self.length_penalty, LENGTH_PENALTY))
        checks.flag("ignore_eos", self.ignore_eos)
        self._set("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_answers(self) -> int:
        return self.beam_width if self.n is None else self.n


_INTEGERS: Mapping[str, Range] = {
    "beam_width": Range(1, BEAMS_MAX),
    "n": Range(1, BEAMS_MAX),
    "max_tokens": Range(1, 1 << 31),
}
