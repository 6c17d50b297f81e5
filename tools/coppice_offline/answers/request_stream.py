"""What came for one request so far. Text, stop texts, reasoning and calls: see the services' `TextStream`."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.ids import TOKEN_BYTES
from coppice.messages.step import TokenLogprobs
from coppice_offline.interface.results import Completion, Piece, TokenLogprob, ToolCall, ToolCallPiece, Usage
from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.text.answer_parts import AnswerParts
from coppice_scheduler.edge.text.detokenizer import Detokenizer
from coppice_scheduler.edge.text.logprobs import MeanLogprob, unpack_logprobs
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.text_stream import Delta, TextOptions, TextStream
from coppice_scheduler.edge.text.tokenizer import unpack_tokens
from coppice_scheduler.edge.text.tools.call_parser import joined_calls

_FAILURES = (Finish.ERROR, Finish.CANCELLED)


class RequestStream:
    """Collects one request. With stop texts it reads along, so that the output ends at the token that completes one."""

    def __init__(
        self,
        index: int,
        request: Request,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        parts: AnswerParts | None = None,
        *,
        is_candidate: bool = False,
        tells_logprobs: bool = True,
    ) -> None:
        """`parts`: takes an answer apart that is more than text.

        `is_candidate`: of several, of which the likeliest will be told. `tells_logprobs`: where the request has any.
        """
        self.request = request
        self.last: Output | None = None
        self._index = index
        self._tells_logprobs = tells_logprobs and request.sampling.num_logprobs is not None
        num_prompt_tokens = len(request.tokens) // TOKEN_BYTES
        self._reader = TextStream(
            index,
            num_prompt_tokens,
            detokenizer,
            StopScanner(stops) if stops else None,
            self._found_stop,
            score=MeanLogprob(num_prompt_tokens) if is_candidate else None,
            parts=parts,
            options=TextOptions(min_tokens=request.sampling.min_tokens),
        )
        self._has_stopped = False
        self._deltas: list[Delta] = []
        self._num_shown = 0  # of them, as pieces
        self._num_token_bytes = 0
        self._logprobs: list[TokenLogprobs] = []

    def _found_stop(self) -> None:
        self._has_stopped = True

    @property
    def num_tokens(self) -> int:
        return self._num_token_bytes // TOKEN_BYTES

    @property
    def has_ended(self) -> bool:
        return self.last is not None

    @property
    def is_complete(self) -> bool:
        """Whether there is a completion."""
        return self.last is not None and bool(self._deltas) and self._deltas[-1].ending is not None

    def take(self, output: Output) -> bool:
        """True: its tokens complete the output, nothing after it counts, and the request can be cancelled."""
        had_stopped = self._has_stopped
        self._logprobs += output.logprobs
        if output.finish is not None:
            self.last = output
        if output.finish not in _FAILURES or had_stopped:
            delta = self._reader.take(output)
            if delta is not None:
                self._deltas.append(delta)
                self._num_token_bytes += len(delta.tokens)
        return self._has_stopped and not had_stopped

    def new_pieces(self) -> list[Piece]:
        """What came since the last call."""
        new, self._num_shown = self._deltas[self._num_shown :], len(self._deltas)
        return [_piece(delta) for delta in new]

    def completion(self) -> Completion:
        """After the last output."""
        assert self.last is not None
        ending = self._deltas[-1].ending
        assert ending is not None
        ids = unpack_tokens(b"".join(delta.tokens for delta in self._deltas))
        by: str | int | None = ending.stop
        if by is None and self.last.stop_token:
            by = int.from_bytes(self.last.stop_token, "little")
        num_prompt = len(self.request.tokens) // TOKEN_BYTES
        return Completion(
            index=self._index,
            text="".join(delta.text for delta in self._deltas),
            token_ids=ids,
            finish_reason=ending.reason,
            stop_reason=by,
            usage=Usage(num_prompt, self.last.num_cached_tokens, len(ids), ending.usage.reasoning_tokens),
            logprobs=self._of_positions(num_prompt, ids) if self._tells_logprobs else None,
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=_calls(self._deltas),
            score=ending.mean_logprob,
        )

    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of the prompt's tokens from the second on."""
        return self._of_positions(1, unpack_tokens(self.request.tokens)[1:])

    def _of_positions(self, first: int, ids: list[int]) -> list[TokenLogprob]:
        found = {reported.position: reported for reported in unpack_logprobs(self._logprobs)}
        places = range(first, first + len(ids))
        return [
            TokenLogprob(ids[place - first], found[place].logprob, dict(found[place].top))
            for place in places
            if place in found
        ]


def _piece(delta: Delta) -> Piece:
    return Piece(
        index=delta.index,
        text=delta.text,
        token_ids=unpack_tokens(delta.tokens),
        reasoning=delta.reasoning,
        tool_calls=tuple(ToolCallPiece(call.index, call.arguments, call.call_id, call.name) for call in delta.calls),
        finish_reason=None if delta.ending is None else delta.ending.reason,
    )


def _calls(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    calls = joined_calls(piece for delta in deltas for piece in delta.calls)
    return tuple(ToolCall(call.call_id, call.name, call.arguments) for call in calls)
