"""An answer as blocks, one after the other as the model wrote them: what it thinks, what it says, each of its calls.

APIs that tell an answer as blocks or items (Anthropic's messages, OpenAI's responses) make them of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from coppice_scheduler.edge.text.text_stream import Delta
from coppice_scheduler.edge.text.tools.call_parser import CallDelta


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next of one block."""

    index: int  # of the block in its answer
    kind: BlockKind
    text: str  # of a call its arguments
    is_first: bool = False
    call: CallDelta | None = None  # that begins with this piece


class AnswerBlocks:
    """Of one answer, as it comes. `index` is that of the open block, -1 before there is any."""

    def __init__(self) -> None:
        self.index = -1
        self._kind: BlockKind | None = None

    def take(self, delta: Delta) -> Iterator[Piece]:
        """Of one delta: what is left of the open call, then reasoning, then text, then the calls that begin."""
        calls = list(delta.calls)
        while calls and not calls[0].name:
            yield Piece(self.index, BlockKind.CALL, calls.pop(0).arguments)
        if delta.reasoning:
            yield self._next(BlockKind.REASONING, delta.reasoning)
        if delta.text:
            yield self._next(BlockKind.TEXT, delta.text)
        for call in calls:
            if call.name:
                self._kind = None
                yield replace(self._next(BlockKind.CALL, call.arguments), call=call)
            else:
                yield Piece(self.index, BlockKind.CALL, call.arguments)

    def _next(self, kind: BlockKind, text: str) -> Piece:
        is_first = kind is not self._kind
        self.index += is_first
        self._kind = kind
        return Piece(self.index, kind, text, is_first)
