"""An answer as blocks, one after the other as the model wrote them: what it thinks, what it says, each of its calls.

APIs that tell an answer as blocks or items (Anthropic's messages, OpenAI's responses) make them of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coppice_scheduler.edge.text.answer_parts import Part, PartKind
from coppice_scheduler.edge.text.text_stream import Delta
from coppice_scheduler.edge.text.tools.call_parser import CallDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next of one block."""

    index: int  # of the block in its answer
    kind: PartKind
    text: str  # of a call its arguments
    is_first: bool
    end: int  # of text and reasoning: characters that the model wrote, up to behind it
    call: CallDelta | None = None  # of which it is


class AnswerBlocks:
    """Of one answer, as it comes. `index` is that of the open block, -1 before there is any."""

    def __init__(self) -> None:
        self.index = -1
        self._kind: PartKind | None = None
        self._num_chars = 0  # of an answer that is text alone

    def take(self, delta: Delta) -> Iterator[Piece]:
        """Of one delta, in the order in which the model wrote them. A block ends where one of another kind begins."""
        if delta.parts:
            yield from map(self._piece, delta.parts)
        elif delta.text:
            self._num_chars += len(delta.text)
            yield self._piece(Part(PartKind.TEXT, delta.text, self._num_chars))

    def _piece(self, part: Part) -> Piece:
        begins_call = part.call is not None and part.call.name != ""
        is_first = begins_call or part.kind is not self._kind
        self.index += is_first
        self._kind = part.kind
        return Piece(self.index, part.kind, part.text, is_first, part.end, part.call)
