"""Answers in the shape of the Anthropic API: blocks of thinking, text and calls in the order in which they came.

    message_start, (content_block_start, content_block_delta..., content_block_stop)..., message_delta, message_stop

A whole answer is put together of the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from coppice_scheduler.edge.anthropic.errors import error_body
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.http.answer_blocks import AnswerBlocks, Piece
from coppice_scheduler.edge.http.sse import named_event
from coppice_scheduler.edge.text.answer_parts import PartKind
from coppice_scheduler.edge.text.text_stream import Delta, Ending, Usage

Body = dict[str, Any]

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
_KINDS = {PartKind.REASONING: THINKING, PartKind.TEXT: TEXT, PartKind.CALL: TOOL_USE}
_BEGINNINGS: dict[str, Body] = {
    TEXT: {"text": ""},
    THINKING: {"thinking": "", "signature": ""},
}
# The type of what comes next of a block, and the field that has it.
SIGNATURE = "unsigned"  # programs send back no thinking without one
PIECES = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
INVALID_JSON = "INVALID_JSON"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STOP_STRING, _FULL = "stop_sequence", "model_context_window_exceeded"
STOP_REASONS = (*_REASONS.values(), _STOP_STRING, _FULL)


def usage_body(usage: Usage) -> Body:
    """Their `input_tokens` are those that were neither found in the cache nor put there.

    One at least is told as such: programs take 0 for "not known", and keep the number of the whole prompt that a stream
    began with.
    """
    cached = min(usage.cached_tokens, usage.prompt_tokens - 1)
    written = min(usage.written_tokens, usage.prompt_tokens - 1 - cached)
    body: Body = {
        "input_tokens": usage.prompt_tokens - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


class MessageShape:
    """How one call is told."""

    def __init__(self, call: Call, model: str, request_id: str, max_tokens: int, *, shows_thinking: bool) -> None:
        """`max_tokens`: that the client asked for; fewer may fit."""
        self._id = f"msg_{call.unique_id}"
        self._model = model
        self._request_id = request_id
        self._prompt = call.prompts[0]
        self._is_cut = self._prompt.max_new_tokens < max_tokens
        self._shows_thinking = shows_thinking
        self._blocks = AnswerBlocks()
        self._pieces: list[Piece] = []  # of what is told whole
        self._open: Piece | None = None  # the first of the block that a stream has open
        self._ending: Ending | None = None

    # --- whole ----------------------------------------------------------------------------------------------------

    def gather(self, delta: Delta) -> None:
        self._pieces += self._blocks.take(delta)
        self._ending = delta.ending

    def whole(self) -> Body:
        content = [self._block([*pieces]) for _, pieces in groupby(self._pieces, lambda piece: piece.index)]
        usage = self._ending.usage if self._ending is not None else Usage(self._prompt.num_prompt_tokens, 0, 0)
        return {**self._message(content), **self._stop(), "usage": usage_body(usage)}

    def _text(self, piece: Piece) -> str:
        return "" if piece.kind is PartKind.REASONING and not self._shows_thinking else piece.text

    def _block(self, pieces: list[Piece]) -> Body:
        text, block = "".join(self._text(piece) for piece in pieces), _beginning(pieces[0])
        if block["type"] == TOOL_USE:
            is_last = pieces[0].index == self._blocks.index
            return {**block, "input": _input(text, may_be_cut=is_last and self._was_cut)}
        if block["type"] == THINKING:
            block["signature"] = SIGNATURE
        return {**block, PIECES[block["type"]][1]: text}

    @property
    def _was_cut(self) -> bool:
        return self._ending is not None and self._ending.reason != "tool_calls"

    def _message(self, content: list[Body]) -> Body:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stop(self) -> Body:
        ending = self._ending
        if ending is None:
            return {"stop_reason": None, "stop_sequence": None}
        if ending.stop is not None:
            return {"stop_reason": _STOP_STRING, "stop_sequence": ending.stop}
        if ending.reason == "length" and self._is_cut:
            return {"stop_reason": _FULL, "stop_sequence": None}
        return {"stop_reason": _REASONS[ending.reason], "stop_sequence": None}

    # --- a stream -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[bytes]:
        # How much of the prompt was cached is known at the end, and told there.
        usage = usage_body(Usage(self._prompt.num_prompt_tokens, 0, 0))
        yield named_event({"type": "message_start", "message": {**self._message([]), **self._stop(), "usage": usage}})

    def events_of(self, delta: Delta) -> Iterator[bytes]:
        for piece in self._blocks.take(delta):
            if piece.is_first:
                yield from self._closed()
                self._open = piece
                yield named_event(
                    {"type": "content_block_start", "index": piece.index, "content_block": _beginning(piece)}
                )
            text = self._text(piece)
            if text:
                kind, name = PIECES[_KINDS[piece.kind]]
                yield named_event(
                    {"type": "content_block_delta", "index": piece.index, "delta": {"type": kind, name: text}}
                )
        self._ending = delta.ending

    def closing(self) -> Iterator[bytes]:
        yield from self._closed()
        usage = self._ending.usage if self._ending is not None else Usage(self._prompt.num_prompt_tokens, 0, 0)
        yield named_event({"type": "message_delta", "delta": self._stop(), "usage": usage_body(usage)})
        yield named_event({"type": "message_stop"})

    def _closed(self) -> Iterator[bytes]:
        """The end of the open block, if there is one."""
        if self._open is None:
            return
        index = self._open.index
        if self._open.kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})

    def failure(self, error: ApiError) -> bytes:
        return named_event(error_body(error, self._request_id))


def _beginning(piece: Piece) -> Body:
    """What a block begins with."""
    kind = _KINDS[piece.kind]
    if piece.call is None:
        return {"type": kind, **_BEGINNINGS[kind]}
    return {"type": kind, "id": piece.call.call_id, "name": piece.call.name, "input": {}}


def _input(arguments: str, *, may_be_cut: bool) -> Body:
    """Of a call that the end of the answer cut, what came by then, as clients read it of a stream.

    What a model wrote that is no object of JSON is given under the name that Anthropic's documents have for it.
    """
    try:
        value = from_json(arguments or "{}", allow_partial=may_be_cut, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
