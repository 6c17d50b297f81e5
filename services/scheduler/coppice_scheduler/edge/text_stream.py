"""Outputs of the engine to pieces of text: detokenised, cut at a stop string, counted. One object per prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from coppice_scheduler.core.request import Finish, Output
from coppice_scheduler.edge.detokenizer import Detokenizer
from coppice_scheduler.edge.errors import ApiError, ErrorKind, from_output
from coppice_scheduler.edge.stops import StopScanner
from coppice_scheduler.edge.tokenizer import TOKEN_DTYPE, unpack_tokens

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    usage: Usage
    stop: str | None = None  # the stop string that was found


@dataclass(frozen=True, slots=True)
class Delta:
    """What one prompt of a call got since its last delta. Exactly one has `ending`, and it is the prompt's last."""

    index: int  # which prompt
    text: str
    tokens: bytes  # packed u32, a stop token at the end included although it has no text
    ending: Ending | None = None


class TextStream:
    """Follows one prompt. `stop_now` is called when a stop string ends it before the engine does."""

    def __init__(
        self,
        index: int,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        scanner: StopScanner | None,
        stop_now: Callable[[], None],
    ) -> None:
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_now = stop_now
        self._stop: str | None = None
        self.num_tokens = 0  # taken so far; after a stop string no more are

    def take(self, output: Output) -> Delta | None:
        """The delta of an Output, if it brings any. Raises ApiError where it says that the request failed."""
        if self._stop is not None:
            return None if output.finish is None else self._end("", b"", output)
        text, tokens = self._read(output.tokens)
        if output.finish is None:
            if self._stop is not None:
                self._stop_now()
            return Delta(self._index, text, tokens) if text or tokens else None
        if output.finish is Finish.ERROR and self._stop is None:
            raise from_output(output.error)
        if output.finish is Finish.CANCELLED and self._stop is None:
            raise ApiError(ErrorKind.UNAVAILABLE, "The server cancelled the request.", code="cancelled")
        if self._stop is None:
            text += self._flush()
        return self._end(text, tokens, output)

    def _read(self, tokens: bytes) -> tuple[str, bytes]:
        if not tokens:
            return "", b""
        ids = unpack_tokens(tokens)
        if self._scanner is None:
            self.num_tokens += len(ids)
            return self._detokenizer.feed(ids), tokens
        text = ""
        for place, token_id in enumerate(ids, start=1):
            # One by one: a stop string ends the output at the token that completes it, however tokens were joined.
            self.num_tokens += 1
            scanned = self._scanner.feed(self._detokenizer.feed([token_id]))
            text += scanned.text
            if scanned.stop is not None:
                self._stop = scanned.stop
                return text, tokens[: place * TOKEN_DTYPE.itemsize]
        return text, tokens

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._scanner is None:
            return text
        scanned = self._scanner.feed(text)
        self._stop = scanned.stop
        return scanned.text if scanned.stop is not None else scanned.text + self._scanner.flush()

    def _end(self, text: str, tokens: bytes, output: Output) -> Delta:
        stopped = self._stop is not None
        if not stopped:
            tokens += output.stop_token
        usage = Usage(
            prompt_tokens=output.num_prompt_tokens or self._num_prompt_tokens,
            completion_tokens=self.num_tokens if stopped else max(output.num_output_tokens, self.num_tokens),
            cached_tokens=output.num_cached_tokens,
        )
        reason: FinishReason = "stop" if stopped or output.finish is Finish.STOP else "length"
        return Delta(self._index, text, tokens, Ending(reason, usage, self._stop))
