"""Answers in the shape of the Anthropic API: blocks of thinking, text and calls in the order in which they came.

    message_start, (content_block_start, content_block_delta..., content_block_stop)..., message_delta, message_stop

A whole answer is put together of the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from coppice_scheduler.edge.anthropic.errors import error_body
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Delta, Ending, Usage

Body = dict[str, Any]

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
_BEGINNINGS: dict[str, Body] = {
    TEXT: {"text": ""},
    THINKING: {"thinking": "", "signature": "unsigned"},  # programs send back no thinking without a signature
}
# The type of what comes next of a block, and the field that has it.
PIECES = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STOP_STRING, _FULL = "stop_sequence", "model_context_window_exceeded"
STOP_REASONS = (*_REASONS.values(), _STOP_STRING, _FULL)


def event(body: Body) -> bytes:
    """One event; its name is the type of its data."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return b"event: %s\ndata: %s\n\n" % (body["type"].encode(), data)


def usage_body(usage: Usage) -> Body:
    """Their `input_tokens` are those that were neither found in the cache nor put there."""
    body: Body = {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - usage.written_tokens, 0),
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one block. The first has what the block begins with."""

    index: int
    kind: str
    text: str
    beginning: Body | None = None


@dataclass(slots=True)
class Blocks:
    """The blocks of one answer as they come. `index` is that of the open one, -1 before there is any."""

    shows_thinking: bool
    index: int = -1
    kind: str = ""

    def take(self, delta: Delta) -> Iterator[Piece]:
        """Of one delta: what is left of the open call, then thinking, then text, then the calls that begin."""
        calls = list(delta.calls)
        while calls and not calls[0].name:
            yield Piece(self.index, TOOL_USE, calls.pop(0).arguments)
        if delta.reasoning:
            yield self._piece(THINKING, delta.reasoning if self.shows_thinking else "")
        if delta.text:
            yield self._piece(TEXT, delta.text)
        for call in calls:
            if call.name:
                yield self._open(TOOL_USE, call.arguments, {"id": call.call_id, "name": call.name, "input": {}})
            else:
                yield Piece(self.index, TOOL_USE, call.arguments)

    def _piece(self, kind: str, text: str) -> Piece:
        return Piece(self.index, kind, text) if self.kind == kind else self._open(kind, text, _BEGINNINGS[kind])

    def _open(self, kind: str, text: str, beginning: Body) -> Piece:
        self.index += 1
        self.kind = kind
        return Piece(self.index, kind, text, {"type": kind, **beginning})


class MessageShape:
    """How one call is told."""

    def __init__(self, call: Call, model: str, request_id: str, max_tokens: int, *, shows_thinking: bool) -> None:
        """`max_tokens`: that the client asked for; fewer may fit."""
        self._id = f"msg_{call.call_id.rpartition('-')[2]}"
        self._model = model
        self._request_id = request_id
        self._prompt = call.prompts[0]
        self._is_cut = self._prompt.max_new_tokens < max_tokens
        self._blocks = Blocks(shows_thinking)
        self._pieces: list[Piece] = []  # of what is told whole
        self._ending: Ending | None = None

    # --- whole ----------------------------------------------------------------------------------------------------

    def gather(self, delta: Delta) -> None:
        self._pieces += self._blocks.take(delta)
        self._ending = delta.ending

    def whole(self) -> Body:
        content = [_whole_block([*pieces]) for _, pieces in groupby(self._pieces, lambda piece: piece.index)]
        usage = self._ending.usage if self._ending is not None else NO_USAGE
        return {**self._message(content), **self._stop(), "usage": usage_body(usage)}

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
        yield event({"type": "message_start", "message": {**self._message([]), **self._stop(), "usage": usage}})

    def events_of(self, delta: Delta) -> Iterator[bytes]:
        for piece in self._blocks.take(delta):
            if piece.beginning is not None:
                if piece.index:
                    yield _stopped(piece.index - 1)
                start = {"type": "content_block_start", "index": piece.index, "content_block": piece.beginning}
                yield event(start)
            if piece.text:
                kind, name = PIECES[piece.kind]
                delta_body = {"type": kind, name: piece.text}
                yield event({"type": "content_block_delta", "index": piece.index, "delta": delta_body})
        self._ending = delta.ending

    def closing(self) -> Iterator[bytes]:
        if self._blocks.index >= 0:
            yield _stopped(self._blocks.index)
        usage = self._ending.usage if self._ending is not None else NO_USAGE
        yield event({"type": "message_delta", "delta": self._stop(), "usage": usage_body(usage)})
        yield event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return event(error_body(error, self._request_id))


def _stopped(index: int) -> bytes:
    return event({"type": "content_block_stop", "index": index})


def _whole_block(pieces: list[Piece]) -> Body:
    text, kind = "".join(piece.text for piece in pieces), pieces[0].kind
    block = {**(pieces[0].beginning or {})}
    return {**block, "input": _input(text)} if kind == TOOL_USE else {**block, PIECES[kind][1]: text}


def _input(arguments: str) -> Body:
    """Of a call that the end of the answer cut: what came by then, as clients read it of a stream."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
