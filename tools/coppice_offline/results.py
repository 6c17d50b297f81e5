"""What `coppice.LLM` answers with: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, before any sampling option."""

    token_id: int
    logprob: float
    top: dict[int, float]  # of the likeliest tokens, likeliest first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. Cached ones are part of the prompt's."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]  # a stop token at the end included, although it has no text
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop text or the stop token that ended it
    usage: Usage
    logprobs: list[TokenLogprob] | None = None  # of `token_ids`, where asked for


@dataclass(frozen=True, slots=True)
class Generation:
    """All continuations of one prompt. The first one's values are its own, too."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: tuple[Completion, ...]
    prompt_logprobs: list[TokenLogprob] | None = None  # from the second token on, where asked for

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Of all continuations together; the prompt counts once."""
        first = self.outputs[0].usage
        return Usage(first.prompt_tokens, first.cached_tokens, sum(each.usage.output_tokens for each in self.outputs))
