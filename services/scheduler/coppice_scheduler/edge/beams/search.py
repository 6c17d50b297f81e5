"""Beam search: the likeliest continuations of a prompt, without any sampling. A pure core: it is told what is likely.

    beams        --> the likeliest next tokens of each      (a step of the engine)
    candidates       all beams with all of these, likeliest first
                     | ends here: a finished answer, if among the first `width`
    beams        <-- the likeliest `width` of the others

An answer's score is the sum of its tokens' log-probabilities, the stop token's included, divided by
`length ** length_penalty`. The search ends when the best beam, at its present length, scores no more than the worst of
`width` finished answers. This is what `transformers` does with `early_stopping=False`, whose results it has.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.messages.sampling import LIKELY_MAX
from coppice.messages.step import TokenLogprobs
from coppice_scheduler.edge.text.tokenizer import pack_tokens


@dataclass(frozen=True, slots=True)
class Likely:
    """The likeliest next tokens of a beam."""

    token_ids: npt.NDArray[np.uint32]  # [K]
    logprobs: npt.NDArray[np.float32]  # [K]

    @classmethod
    def of(cls, report: TokenLogprobs) -> Likely:
        """What a worker reported of one token."""
        num_top = report.num_top
        return cls(np.frombuffer(report.top_ids, "<u4")[:num_top], np.frombuffer(report.top, "<f4")[:num_top])


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer."""

    tokens: bytes  # packed u32
    logprob: float  # sum of its tokens'


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer. `stop_token`: what ended it, none where it is as long as it may be; it is not among `tokens`."""

    tokens: bytes  # packed u32
    score: float
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class BeamOptions:
    width: int
    length_penalty: float
    max_tokens: int  # of an answer, a stop token included
    stop_token_ids: Set[int]

    @property
    def num_likely(self) -> int:
        return num_likely_of(self.width, len(self.stop_token_ids))


def num_likely_of(width: int, num_stop_tokens: int) -> int:
    """How many of each beam's next tokens have to be known: `width` of all candidates go on, whatever ends."""
    return max(2, 1 + num_stop_tokens) * width


def num_stop_tokens_max(width: int) -> int:
    """With more of them a worker does not report as many as have to be known."""
    return LIKELY_MAX // width - 1


@dataclass(frozen=True, slots=True)
class _Candidate:
    logprob: float  # of all its tokens
    beam: int  # place of the beam that it goes on from
    token: int


class BeamSearch:
    """One prompt's. While not `is_done`: ask for the `num_likely` likeliest next tokens of each of `beams`, `take`."""

    def __init__(self, options: BeamOptions) -> None:
        self._options = options
        self._finished: list[Finished] = []  # best first
        self._length = 0  # of each beam
        self.beams = [Beam(b"", 0.0)]
        self.is_done = False

    @property
    def num_likely(self) -> int:
        return self._options.num_likely

    def best(self, count: int) -> list[Finished]:
        """Of the finished answers, best first; when it is done there are `width`, unless the vocabulary has fewer."""
        return self._finished[:count]

    def take(self, likely: Sequence[Likely]) -> None:
        """The likeliest next tokens of each beam, in their order."""
        options = self._options
        candidates = self._candidates(likely)
        self._length += 1
        is_full = self._length == options.max_tokens
        going_on = [] if is_full else [each for each in candidates if each.token not in options.stop_token_ids]
        for candidate in candidates[: options.width]:
            if is_full or candidate.token in options.stop_token_ids:
                self._finished.append(self._end(candidate))
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[options.width :]
        self.beams = [self._longer(candidate) for candidate in going_on[: options.width]]
        self.is_done = not self.beams or not self._may_improve()

    def _candidates(self, likely: Sequence[Likely]) -> list[_Candidate]:
        """The likeliest `num_likely`, likeliest first: no more can matter."""
        logprobs = np.concatenate(
            [beam.logprob + each.logprobs.astype(np.float64) for beam, each in zip(self.beams, likely, strict=True)]
        )
        token_ids = np.concatenate([each.token_ids for each in likely])
        places = np.repeat(np.arange(len(likely)), [len(each.token_ids) for each in likely])
        order = np.lexsort((token_ids, places, -logprobs))[: self.num_likely]
        told = zip(logprobs[order].tolist(), places[order].tolist(), token_ids[order].tolist(), strict=True)
        return [_Candidate(*each) for each in told]

    def _may_improve(self) -> bool:
        if len(self._finished) < self._options.width:
            return True
        return self._score(self.beams[0].logprob) > self._finished[-1].score

    def _score(self, logprob: float) -> float:
        """Of an answer that is as long as the beams are now."""
        score: float = logprob / self._length**self._options.length_penalty
        return score

    def _longer(self, candidate: _Candidate) -> Beam:
        return Beam(self.beams[candidate.beam].tokens + pack_tokens([candidate.token]), candidate.logprob)

    def _end(self, candidate: _Candidate) -> Finished:
        tokens, score = self.beams[candidate.beam].tokens, self._score(candidate.logprob)
        if candidate.token in self._options.stop_token_ids:
            return Finished(tokens, score, candidate.token)
        return Finished(tokens + pack_tokens([candidate.token]), score, None)
