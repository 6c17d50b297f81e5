"""Outputs of the engine to pieces of text: detokenised, cut at a stop string, counted. One object per answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coppice_scheduler.core.state.request import Finish, Output
from coppice_scheduler.edge.base.errors import failure_of
from coppice_scheduler.edge.text.answer_parts import AnswerParts, Part, PartKind
from coppice_scheduler.edge.text.detokenizer import Detokenizer, DetokenizerFactory
from coppice_scheduler.edge.text.logprobs import EchoedLogprobs, LogprobTrack, MeanLogprob, PromptLogprobs, TokenLogprob
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE, unpack_tokens
from coppice_scheduler.edge.text.tools.call_parser import CallDelta

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    written_tokens: int = 0  # of the prompt, computed and made findable for others
    reasoning_tokens: int = 0  # of the completion

    def without_cached_tokens(self) -> Usage:
        """Without what the cache knew of the prompt, and what it knows now: each of both gives the other away."""
        return replace(self, cached_tokens=0, written_tokens=0)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.written_tokens + other.written_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    usage: Usage
    stop: str | None = None  # the stop string that was found
    mean_logprob: float | None = None  # of all that was sampled, where the best answer is chosen


@dataclass(frozen=True, slots=True)
class Delta:
    """What one answer of a call got since its last delta. Exactly one has `ending`, and it is the answer's last."""

    index: int  # which answer: those of the first prompt come first
    text: str
    tokens: bytes  # packed u32, a stop token at the end included although it has no text
    ending: Ending | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of tokens whose text was sent; a stop token has none
    calls: tuple[CallDelta, ...] = ()  # of tools; their text is not in `text`
    reasoning: str = ""  # nor is this
    parts: tuple[Part, ...] = ()  # text, reasoning and calls in the order in which they were written; () of plain text
    prompt: PromptLogprobs | None = None  # with the answer's first, where they are to be told
    echoed: EchoedLogprobs | None = None  # with the answer's first, before `logprobs`, where the prompt is echoed

    @property
    def all_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the text of this delta, an echo included. Raises ApiError."""
        return self.logprobs if self.echoed is None else (*self.echoed.entries(), *self.logprobs)


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, where an answer begins with it."""

    text: str
    offsets: Sequence[int]  # characters of `text` before each of its tokens, where log-probabilities are shown
    num_logprobs: int = 0  # likeliest tokens to show beside each


def echo_of(
    tokens: bytes,
    text: str | None,
    detokenizers: DetokenizerFactory,
    num_logprobs: int | None,
    skip_special_tokens: bool,
) -> Echo:
    """The text as it was sent, where it was text; places of tokens in it where they will be shown."""
    if text is not None and num_logprobs is None:
        return Echo(text, ())
    stream = detokenizers.start([], skip_special_tokens=skip_special_tokens)
    offsets, num_chars, pieces = [], 0, []
    for token_id in unpack_tokens(tokens):
        offsets.append(num_chars)
        pieces.append(stream.feed([token_id]))
        num_chars += len(pieces[-1])
    return Echo(text if text is not None else "".join(pieces) + stream.flush(), offsets, num_logprobs or 0)


@dataclass(frozen=True, slots=True)
class TextOptions:
    min_tokens: int = 0  # stop strings count in the text after so many tokens
    shows_output: bool = True  # False: only the echo was asked for
    shows_stop_token: bool = False  # its text stays in the answer
    is_extra_choice: bool = False  # its prompt was counted with the first choice
    echo: Echo | None = None
    tells_prompt: bool = False  # log-probabilities of the prompt, apart from the answer's


class TextStream:
    """Follows one answer. `stop_now` is called when a stop string ends it before the engine does."""

    def __init__(
        self,
        index: int,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        scanner: StopScanner | None,
        stop_now: Callable[[], None],
        *,
        track: LogprobTrack | None = None,
        prompt: PromptLogprobs | None = None,
        score: MeanLogprob | None = None,
        parts: AnswerParts | None = None,
        options: TextOptions = TextOptions(),
    ) -> None:
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_now = stop_now
        self._track = track
        self._prompt = prompt
        self._score = score
        self._parts = parts
        self._num_reasoning_tokens = 0
        self._options = options
        self._echo = options.echo
        self._stop: str | None = None
        self._is_cut = False  # by us, before the engine ended it
        self._num_sent_chars = 0
        self.num_tokens = 0  # taken so far; after a stop string no more are

    def take(self, output: Output) -> Delta | None:
        """The delta of an Output, if it brings any. Raises ApiError where it says that the request failed."""
        if self._is_cut:
            return None if output.finish is None else self._end("", b"", output)
        for report in output.logprobs:
            for follower in (self._track, self._prompt, self._score):
                if follower is not None:
                    follower.add(report)
        text, tokens = self._read(output.tokens) if self._options.shows_output else ("", b"")
        if output.finish is None:
            if self._is_cut:
                self._stop_now()
            return self._delta(text, tokens, None) if text or tokens else None
        if not self._is_cut:
            failure = failure_of(output)
            if failure is not None:
                raise failure
            if output.stop_token and self._options.shows_stop_token:
                text += self._scan(self._detokenizer.feed(unpack_tokens(output.stop_token)))
            text += self._flush()
        return self._end(text, tokens, output)

    def _read(self, tokens: bytes) -> tuple[str, bytes]:
        if not tokens:
            return "", b""
        ids = unpack_tokens(tokens)
        counts_tokens = self._parts is not None and self._parts.counts_tokens
        if self._scanner is None and self._track is None and not counts_tokens:
            self.num_tokens += len(ids)
            return self._scan(self._detokenizer.feed(ids)), tokens
        text = ""
        for place, token_id in enumerate(ids, start=1):
            # One by one: what ends the output ends it at the token that completes it, however tokens were joined.
            self.num_tokens += 1
            new = self._detokenizer.feed([token_id])
            if self._track is not None:
                self._track.saw(token_id, len(new), is_open=self._detokenizer.is_open)
            was_reasoning = self._is_reasoning
            text += self._scan(new)
            self._num_reasoning_tokens += was_reasoning or self._is_reasoning
            if self._is_cut:
                return text, tokens[: place * TOKEN_DTYPE.itemsize]
        return text, tokens

    def _scan(self, new: str) -> str:
        """What of `new`, and of what was held back, may be sent. Sets `_stop` and `_is_cut`."""
        if self._scanner is not None and self.num_tokens > self._options.min_tokens:
            scanned = self._scanner.feed(new)
            self._stop = scanned.stop
            new = scanned.text
        if self._parts is not None:
            self._parts.feed(new)
        self._is_cut = self._stop is not None or (self._parts is not None and self._parts.is_done)
        return new

    @property
    def _is_reasoning(self) -> bool:
        return self._parts is not None and self._parts.is_reasoning

    def _flush(self) -> str:
        if self._is_cut:
            return ""
        rest = self._detokenizer.flush()
        if self._track is not None:
            self._track.saw_end(len(rest))
        text = self._scan(rest)
        if self._scanner is None or self._is_cut:
            return text
        held = self._scanner.flush()
        if self._parts is not None:
            self._parts.feed(held)
        return text + held

    def _delta(self, text: str, tokens: bytes, ending: Ending | None) -> Delta:
        logprobs: tuple[TokenLogprob, ...] = ()
        echoed: EchoedLogprobs | None = None
        echo, self._echo = self._echo, None
        prompt, self._prompt = self._prompt, None
        if echo is not None:
            text = echo.text + text
            if self._track is not None and prompt is not None:
                echoed = EchoedLogprobs(prompt, echo.num_logprobs, echo.offsets)
        told = prompt if self._options.tells_prompt else None
        self._num_sent_chars += len(text)
        if self._track is not None:
            if ending is not None and ending.stop is None:
                logprobs += self._track.release_all()
            else:
                logprobs += self._track.release(self._num_sent_chars)
        if self._parts is None:
            return Delta(self._index, text, tokens, ending, logprobs, prompt=told, echoed=echoed)
        parts = self._parts.take()
        return Delta(
            self._index,
            "".join(part.text for part in parts if part.kind is PartKind.TEXT),
            tokens,
            ending,
            logprobs,
            calls=tuple(part.call for part in parts if part.call is not None),
            reasoning="".join(part.text for part in parts if part.kind is PartKind.REASONING),
            parts=parts,
            prompt=told,
            echoed=echoed,
        )

    def _end(self, text: str, tokens: bytes, output: Output) -> Delta:
        if self._parts is not None:
            self._parts.flush(was_cut=self._stop is not None or output.finish is Finish.LENGTH)
        stopped = self._is_cut
        reason: FinishReason = "stop" if stopped or output.finish is Finish.STOP else "length"
        if reason == "stop" and self._parts is not None and self._parts.ends_with_calls:
            reason = "tool_calls"
        num_tokens = self.num_tokens if stopped else max(output.num_output_tokens, self.num_tokens)
        if not self._options.shows_output:
            num_tokens, reason = 0, "length"
        elif not stopped:
            tokens += output.stop_token
        score = self._score.of(num_tokens) if self._score is not None else None
        return self._delta(text, tokens, Ending(reason, self._usage(output, num_tokens), self._stop, score))

    def _usage(self, output: Output, num_tokens: int) -> Usage:
        if self._options.is_extra_choice:
            return Usage(0, num_tokens, 0, reasoning_tokens=self._num_reasoning_tokens)
        return Usage(
            prompt_tokens=output.num_prompt_tokens or self._num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=output.num_cached_tokens,
            written_tokens=output.num_written_tokens,
            reasoning_tokens=self._num_reasoning_tokens,
        )
