"""Answers as responses: items of reasoning, text and calls in the order in which they came.

    response.created, response.in_progress, (output_item.added, its parts and deltas, output_item.done)...,
    response.completed, response.incomplete, or response.failed and an error

Every event has the next number. A whole answer is put together of the same items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.frontend.calls import Call
from coppice_scheduler.edge.http.answer_blocks import AnswerBlocks, Piece
from coppice_scheduler.edge.http.sse import named_event
from coppice_scheduler.edge.openai.responses.logprobs import TextLogprobs, WrittenLists
from coppice_scheduler.edge.text.answer_parts import PartKind
from coppice_scheduler.edge.text.logprobs import TokenLogprob
from coppice_scheduler.edge.text.text_stream import Delta, Ending, Usage

Body = dict[str, Any]
# Of each kind: what the id of an item begins with, and the type of its part and of the events about that.
_ID = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
PARTS = {PartKind.REASONING: "reasoning_text", PartKind.TEXT: "output_text"}
DONE, CUT, OPEN, FAILED = "completed", "incomplete", "in_progress", "failed"


def usage_body(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Item:
    """One item of the output, as far as it has come."""

    def __init__(self, unique_id: str, first: Piece) -> None:
        self.index = first.index
        self.kind = first.kind
        self.item_id = f"{_ID[first.kind]}_{unique_id}-{first.index}"
        self._call = first.call
        self._texts: list[str] = []
        self.entries: list[TokenLogprob] = []  # of what is told whole
        self.logprobs: list[Body] | str = []  # as they are told, or what stands for them

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def part(self, *, is_open: bool = False) -> Body:
        """With what has come, or, while it is open, with nothing."""
        part: Body = {"type": PARTS[self.kind], "text": "" if is_open else self.text}
        if self.kind is PartKind.TEXT:
            part.update(annotations=[], logprobs=[] if is_open else self.logprobs)
        return part

    def body(self, status: str) -> Body:
        """With what has come, or, while it is open, with nothing."""
        content = [self.part()] if self.kind in PARTS and status != OPEN else []
        match self.kind:
            case PartKind.CALL:
                call = self._call
                assert call is not None
                return {
                    "id": self.item_id,
                    "type": "function_call",
                    "call_id": call.call_id,
                    "name": call.name,
                    "arguments": "" if status == OPEN else self.text,
                    "status": status,
                }
            case PartKind.REASONING:
                return {"id": self.item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
            case PartKind.TEXT:
                return {
                    "id": self.item_id,
                    "type": "message",
                    "role": "assistant",
                    "content": content,
                    "status": status,
                }


class ResponseShape:
    """How one call is told. `logprobs`: where those of its text are told, too."""

    def __init__(
        self, call: Call, model: str, created: int, told_again: Body, logprobs: TextLogprobs | None = None
    ) -> None:
        self._unique_id = call.unique_id
        self._frame = {
            "id": f"resp_{call.unique_id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "instructions": None,
            "previous_response_id": None,
            "store": False,
            "tools": [],
            "truncation": "disabled",
            **told_again,
        }
        self._blocks = AnswerBlocks()
        self._items: list[_Item] = []
        self._logprobs = logprobs
        self._written = WrittenLists() if logprobs is not None else None  # log-probabilities, by item
        self._ending: Ending | None = None
        self._number = 0

    # --- whole ----------------------------------------------------------------------------------------------------

    def gather(self, delta: Delta) -> None:
        for piece in self._taken(delta):
            item = self._items[piece.index]
            item.add(piece.text)
            if self._logprobs is not None:
                item.entries += self._logprobs.of(piece)

    def whole(self) -> Body:
        if self._logprobs is not None:
            for item in self._items:
                item.logprobs = self._logprobs.told(item.entries)
        return self._response()

    def _taken(self, delta: Delta) -> Iterator[Piece]:
        """Pieces of a delta; the item of each is there."""
        if self._logprobs is not None:
            self._logprobs.add(delta.logprobs)
        for piece in self._blocks.take(delta):
            if piece.is_first:
                self._items.append(_Item(self._unique_id, piece))
            yield piece
        if delta.ending is not None:
            self._ending = delta.ending

    def _response(self) -> Body:
        ending = self._ending
        is_cut = ending is not None and ending.reason == "length"
        status = OPEN if ending is None else CUT if is_cut else DONE
        last = len(self._items) - 1
        return {
            **self._frame,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item.body(CUT if is_cut and item.index == last else DONE) for item in self._items],
            "usage": usage_body(ending.usage) if ending is not None else None,
        }

    # --- a stream -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response())

    def events_of(self, delta: Delta) -> Iterator[bytes]:
        for piece in self._taken(delta):
            item = self._items[piece.index]
            if piece.is_first:
                if piece.index:
                    yield from self._closed(self._items[piece.index - 1], DONE)
                yield from self._opened(item)
            if piece.text:
                item.add(piece.text)
                yield self._delta(item, piece)

    def closing(self) -> Iterator[bytes]:
        response = self._response()
        if self._items:
            yield from self._closed(self._items[-1], response["status"])
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """Two events: programs read one or the other. The `openai` package raises at the second, for its `error`."""
        told = {"code": error.code or error.kind.type_name, "message": error.message}
        response = {**self._response(), "status": FAILED, "error": told}
        if response["output"]:
            response["output"][-1]["status"] = CUT
        error_told = {**told, "type": error.kind.type_name, "param": error.param}
        failed = self._event("response.failed", response=response)
        return failed + self._event("error", **told, param=error.param, error=error_told)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        written = named_event(body)
        return written if self._written is None else self._written.put_into(written)

    def _opened(self, item: _Item) -> Iterator[bytes]:
        if self._written is not None:
            item.logprobs = self._written.begin(item.index)
        yield self._event("response.output_item.added", output_index=item.index, item=item.body(OPEN))
        if item.kind in PARTS:
            yield self._event("response.content_part.added", **_place(item), part=item.part(is_open=True))

    def _delta(self, item: _Item, piece: Piece) -> bytes:
        logprobs = self._told(piece)
        if item.kind is PartKind.CALL:
            where = {"item_id": item.item_id, "output_index": item.index}
            return self._event("response.function_call_arguments.delta", **where, delta=piece.text)
        more: Body = {"logprobs": logprobs} if item.kind is PartKind.TEXT else {}
        return self._event(f"response.{PARTS[item.kind]}.delta", **_place(item), delta=piece.text, **more)

    def _told(self, piece: Piece) -> list[Body] | str:
        """Log-probabilities of a piece, or what stands for them."""
        if self._logprobs is None or self._written is None:
            return []
        return self._written.add(piece.index, self._logprobs.told(self._logprobs.of(piece)))

    def _closed(self, item: _Item, status: str) -> Iterator[bytes]:
        if item.kind is PartKind.CALL:
            where = {"item_id": item.item_id, "output_index": item.index}
            yield self._event("response.function_call_arguments.done", **where, arguments=item.text)
        else:
            more: Body = {"logprobs": item.logprobs} if item.kind is PartKind.TEXT else {}
            yield self._event(f"response.{PARTS[item.kind]}.done", **_place(item), text=item.text, **more)
            yield self._event("response.content_part.done", **_place(item), part=item.part())
        yield self._event("response.output_item.done", output_index=item.index, item=item.body(status))


def _place(item: _Item) -> Body:
    return {"item_id": item.item_id, "output_index": item.index, "content_index": 0}
