"""Log-probabilities beside the text that they belong to.

    engine   TokenLogprobs by position    -> add
    tokens   in order, with their text    -> saw
    text     what may be sent by now      -> release: the tokens whose whole text was sent

What is reported of a prompt is kept as it came (PromptLogprobs), and told with the answer's beginning.

So a token is never shown before its text is: what a stop string holds back, its log-probabilities hold back too, and
tokens of which a stop string takes a part are not shown at all. A token that is a part of a character goes with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coppice.messages.step import TokenLogprobs
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE, unpack_tokens

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; as OpenAI does it


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer. `top`: (token id, log-probability), likeliest first."""

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...]
    text_offset: int  # characters of the text before it
    rank: int | None = None  # of a prompt's token: how many tokens are at least as likely, itself among them
    text_end: int = 0  # of an answer's token: characters up to behind it; tokens of one character end together


@dataclass(frozen=True, slots=True)
class Reported:
    """What a worker said of the token at one position. `top`: (token id, log-probability), likeliest first."""

    position: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None  # as in TokenLogprob


class LogprobTrack:
    """Follows one answer. `first_position` is that of its first token, `first_offset` the characters before it."""

    def __init__(self, first_position: int, first_offset: int = 0) -> None:
        self._rows: dict[int, Reported] = {}
        self._first_position = self._position = first_position
        self._offset = first_offset
        self._open: list[tuple[int, int]] = []  # (token id, start): seen, but their character is not complete
        self._closed: deque[tuple[int, TokenLogprob]] = deque()  # (end, token)

    def add(self, report: TokenLogprobs) -> None:
        for reported in unpack_logprobs((report,), least=LEAST_LOGPROB):
            if reported.position >= self._first_position:
                self._rows[reported.position] = reported

    def saw(self, token_id: int, num_chars: int, *, is_open: bool) -> None:
        """The next output token, how much text it completed, and whether it ends within a character."""
        self._open.append((token_id, self._offset))
        self._offset += num_chars
        if not is_open:
            self._close()

    def saw_end(self, num_chars: int) -> None:
        """No token follows; the last of them, whose character is not complete, are so much text."""
        self._offset += num_chars
        self._close()

    def release(self, num_chars: int) -> tuple[TokenLogprob, ...]:
        """Those that lie in the first `num_chars` characters and were not released before."""
        released = []
        while self._closed and self._closed[0][0] <= num_chars:
            released.append(self._closed.popleft()[1])
        return tuple(released)

    def release_all(self) -> tuple[TokenLogprob, ...]:
        self._close()
        return self.release(self._offset)

    def _close(self) -> None:
        for token_id, start in self._open:
            self._closed.append((self._offset, self._entry(self._position, token_id, start)))
            self._position += 1
        self._open.clear()

    def _entry(self, position: int, token_id: int, offset: int) -> TokenLogprob:
        row = self._rows.pop(position, None)
        if row is None:
            raise _missing(position)
        return TokenLogprob(token_id, row.logprob, row.top, offset, text_end=self._offset)


class PromptLogprobs:
    """What is reported of a prompt's tokens. It stays packed until somebody tells it: prompts may be long."""

    def __init__(self, tokens: bytes) -> None:
        """`tokens`: packed u32."""
        self._tokens = tokens
        self._reports: list[TokenLogprobs] = []

    def add(self, report: TokenLogprobs) -> None:
        """Of a part of the prompt; what is said of later tokens does not count."""
        if report.first_position * TOKEN_DTYPE.itemsize < len(self._tokens):
            self._reports.append(report)

    def entries(self, num_top: int, offsets: Sequence[int] | None = None) -> Iterator[TokenLogprob]:
        """All tokens in order, with the `num_top` likeliest in their places. Raises ApiError where one is missing."""
        ids = unpack_tokens(self._tokens)
        offsets = offsets if offsets is not None else [0] * len(ids)
        yield TokenLogprob(ids[0], None, (), offsets[0])
        place = 1
        for reported in unpack_logprobs(self._reports, least=LEAST_LOGPROB):
            if reported.position != place:
                break
            yield TokenLogprob(ids[place], reported.logprob, reported.top[:num_top], offsets[place], reported.rank)
            place += 1
        if place < len(ids):
            raise _missing(place)


@dataclass(frozen=True, slots=True)
class EchoedLogprobs:
    """Those of a prompt that an answer begins with, packed until they are told."""

    prompt: PromptLogprobs
    num_top: int
    offsets: Sequence[int]  # characters before each token

    def entries(self) -> Iterator[TokenLogprob]:
        """Raises ApiError where one is missing."""
        return self.prompt.entries(self.num_top, self.offsets)


class MeanLogprob:
    """Of the tokens that an answer sampled: how likely the model thought it, whatever its length."""

    def __init__(self, first_position: int) -> None:
        self._first_position = first_position
        self._chosen = bytearray()  # f32

    def add(self, report: TokenLogprobs) -> None:
        if report.first_position >= self._first_position:
            self._chosen += report.chosen

    def of(self, num_tokens: int) -> float:
        """Of the first so many tokens, a stop token included; 0 of none."""
        chosen = np.frombuffer(self._chosen, "<f4")[:num_tokens]
        return float(np.maximum(chosen, LEAST_LOGPROB).mean(dtype=np.float64)) if len(chosen) else 0.0


def _missing(position: int) -> ApiError:
    return ApiError(ErrorKind.INTERNAL, f"The engine reported no log-probability at {position}.", code="no_logprobs")


def unpack_logprobs(reports: Iterable[TokenLogprobs], least: float = -math.inf) -> Iterator[Reported]:
    """What was reported of each position. No log-probability is below `least`."""
    for report in reports:
        chosen = np.maximum(np.frombuffer(report.chosen, "<f4"), least).tolist()
        ids = np.frombuffer(report.top_ids, "<u4").reshape(len(chosen), report.num_top).tolist()
        top = np.maximum(np.frombuffer(report.top, "<f4"), least).reshape(len(chosen), report.num_top).tolist()
        ranks = np.frombuffer(report.ranks, "<u4").tolist() or [None] * len(chosen)
        for place, logprob in enumerate(chosen):
            position = report.first_position + place
            yield Reported(position, logprob, tuple(zip(ids[place], top[place], strict=True)), ranks[place])
