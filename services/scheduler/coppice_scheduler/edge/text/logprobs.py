"""Log-probabilities beside the text that they belong to.

    engine   TokenLogprobs by position    -> add
    tokens   in order, with their text    -> saw
    text     what may be sent by now      -> release: the tokens whose whole text was sent

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

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; as OpenAI does it


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer. `top`: (token id, log-probability), likeliest first."""

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...]
    text_offset: int  # characters of the text before it


@dataclass(frozen=True, slots=True)
class _Row:
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobTrack:
    """Follows one answer. `num_prompt_tokens` is the position of its first output token, `echo_chars` its offset."""

    def __init__(self, num_prompt_tokens: int, echo_chars: int = 0) -> None:
        self._rows: dict[int, _Row] = {}
        self._num_prompt_tokens = num_prompt_tokens
        self._position = num_prompt_tokens
        self._offset = echo_chars
        self._open: list[tuple[int, int]] = []  # (token id, start): seen, but their character is not complete
        self._closed: deque[tuple[int, TokenLogprob]] = deque()  # (end, token)

    def add(self, report: TokenLogprobs) -> None:
        for position, logprob, top in unpack_logprobs((report,), least=LEAST_LOGPROB):
            self._rows[position] = _Row(logprob, top)

    def prompt(self, ids: Sequence[int], offsets: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The prompt's tokens, for an answer that begins with them."""
        shown = [TokenLogprob(ids[0], None, (), offsets[0])]
        shown += [self._entry(place, ids[place], offsets[place]) for place in range(1, self._num_prompt_tokens)]
        return tuple(shown)

    def saw(self, token_id: int, num_chars: int, *, is_open: bool) -> None:
        """The next output token, how much text it completed, and whether it ends within a character."""
        self._open.append((token_id, self._offset))
        self._offset += num_chars
        if not is_open:
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
            raise ApiError(
                ErrorKind.INTERNAL, f"The engine reported no log-probability at {position}.", code="no_logprobs"
            )
        return TokenLogprob(token_id, row.logprob, row.top, offset)


def unpack_logprobs(
    reports: Iterable[TokenLogprobs], least: float = -math.inf
) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Position, log-probability of the token there, (token id, log-probability) of the likeliest; at least `least`."""
    for report in reports:
        chosen = np.maximum(np.frombuffer(report.chosen, "<f4"), least).tolist()
        ids = np.frombuffer(report.top_ids, "<u4").reshape(len(chosen), report.num_top).tolist()
        top = np.maximum(np.frombuffer(report.top, "<f4"), least).reshape(len(chosen), report.num_top).tolist()
        for place, logprob in enumerate(chosen):
            yield report.first_position + place, logprob, tuple(zip(ids[place], top[place], strict=True))
