"""A generation while it comes: `for piece in llm.stream(...)`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from types import TracebackType
from typing import Self

from coppice.errors import CoppiceError, UsageError
from coppice_offline.answers.generation import generation_of
from coppice_offline.answers.request_stream import RequestStream
from coppice_offline.interface.results import Generation, Piece
from coppice_offline.prompts import Read


class GenerationStream(Iterator[Piece]):
    """Pieces of one prompt's continuations, as they are computed.

    Work is done while a piece is waited for, and only then. Who leaves the loop before its end cancels the request; a
    stream that has a name is closed by `close`, or by a `with` around it.
    """

    def __init__(self, prompt: Read, group: Sequence[RequestStream], turns: Generator[None, None, None]) -> None:
        """`turns` does one turn of work with each value; closing it cancels the group."""
        self._prompt = prompt
        self._group = group
        self._turns = turns
        self._pieces: deque[Piece] = deque()
        self._error: CoppiceError | None = None

    def __next__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            next(self._turns)
            for stream in self._group:
                self._pieces.extend(stream.new_pieces())
        return self._pieces.popleft()

    def close(self) -> None:
        """End the request and give back what it holds. Nothing happens where it has ended.

        Raises UsageError while a piece is computed, in another thread or around a signal's handler.
        """
        if getgeneratorstate(self._turns) == GEN_RUNNING:
            raise UsageError("this stream is at work, so it cannot be closed")
        self._pieces.clear()
        self._turns.close()

    def fail(self, error: CoppiceError) -> None:
        """Close it; who still reads it before its end gets `error`. Raises UsageError while a piece is computed."""
        had_ended = self.has_ended
        self.close()
        if not had_ended:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether everything was computed."""
        return all(stream.is_complete for stream in self._group)

    @property
    def generation(self) -> Generation:
        """The whole, as `generate` would have given it. Raises UsageError before the end."""
        if not self.has_ended:
            raise UsageError("the generation is not complete", hint="read its stream to the end")
        return generation_of(self._prompt, self._group, len(self._group))
