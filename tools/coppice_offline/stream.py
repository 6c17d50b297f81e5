"""What came for one request so far. Text and stop texts are the work of the services' `TextStream`."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.ids import TOKEN_BYTES
from coppice.messages.step import TokenLogprobs
from coppice_offline.results import Completion, TokenLogprob, Usage
from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.text.detokenizer import Detokenizer
from coppice_scheduler.edge.text.logprobs import unpack_logprobs
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.text_stream import Ending, TextOptions, TextStream
from coppice_scheduler.edge.text.tokenizer import unpack_tokens

_FAILURES = (Finish.ERROR, Finish.CANCELLED)


class RequestStream:
    """Collects one request. With stop texts it reads along, so that the output ends at the token that completes one."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.request = request
        self.last: Output | None = None
        self._index = index
        self._reader = TextStream(
            index,
            len(request.tokens) // TOKEN_BYTES,
            detokenizer,
            StopScanner(stops) if stops else None,
            self._found_stop,
            options=TextOptions(min_tokens=request.sampling.min_tokens),
        )
        self._has_stopped = False
        self._tokens = bytearray()
        self._text: list[str] = []
        self._ending: Ending | None = None
        self._logprobs: list[TokenLogprobs] = []

    def _found_stop(self) -> None:
        self._has_stopped = True

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def take(self, output: Output) -> bool:
        """True: its tokens complete a stop text, nothing after it counts, and the request can be cancelled."""
        had_stopped = self._has_stopped
        self._logprobs += output.logprobs
        if output.finish is not None:
            self.last = output
        if output.finish not in _FAILURES or had_stopped:
            delta = self._reader.take(output)
            if delta is not None:
                self._tokens += delta.tokens
                self._text.append(delta.text)
                self._ending = delta.ending
        return self._has_stopped and not had_stopped

    def completion(self) -> Completion:
        """After the last output."""
        assert self.last is not None
        assert self._ending is not None
        ids = unpack_tokens(bytes(self._tokens))
        by: str | int | None = self._ending.stop
        if by is None and self.last.stop_token:
            by = int.from_bytes(self.last.stop_token, "little")
        num_prompt = len(self.request.tokens) // TOKEN_BYTES
        usage = Usage(num_prompt, self.last.num_cached_tokens, len(ids))
        wanted = self.request.sampling.num_logprobs is not None
        logprobs = self._of_positions(num_prompt, ids) if wanted else None
        return Completion(self._index, "".join(self._text), ids, self._ending.reason, by, usage, logprobs)

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
