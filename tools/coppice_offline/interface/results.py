"""What `coppice.LLM` answers with: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    reasoning_tokens: int = 0  # part of the output's


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of a call. The first of a call has its id and its name."""

    index: int  # of the call in its completion
    arguments: str  # what comes next of the JSON
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one continuation since its last piece. Exactly one has a finish reason, and it is the last."""

    index: int  # of the continuation
    text: str  # whole characters; may be empty
    token_ids: list[int]
    reasoning: str = ""  # of a chat; no part of `text`
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish_reason: FinishReason | None = None


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
    reasoning: str = ""  # of a chat: what the model thought before; no part of `text`
    tool_calls: tuple[ToolCall, ...] = ()  # of a chat with tools; no part of `text`
    # The best come first. Of `best_of`: the mean log-probability of the tokens. Of a beam search: their sum, divided by
    # the length to the power of the penalty.
    score: float | None = None

    def as_message(self) -> dict[str, Any]:
        """The answer of a chat as a message, to go on with the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


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
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def usage(self) -> Usage:
        """Of all continuations together; the prompt counts once."""
        first, each = self.outputs[0].usage, [output.usage for output in self.outputs]
        return Usage(
            first.prompt_tokens,
            first.cached_tokens,
            sum(usage.output_tokens for usage in each),
            sum(usage.reasoning_tokens for usage in each),
        )
