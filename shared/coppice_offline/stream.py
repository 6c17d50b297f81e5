"""What came for one request so far, and the text that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice.messages.step import TokenLogprobs
from coppice_offline.results import Completion, FinishReason, TokenLogprob, Usage
from coppice_scheduler.core.request import Finish, Output, Request
from coppice_scheduler.edge.detokenizer import Detokenizer
from coppice_scheduler.edge.stops import StopScanner
from coppice_scheduler.edge.tokenizer import unpack_tokens


class RequestStream:
    """Collects one request. With stop texts it reads along, so that the output ends at the token that completes one."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.request = request
        self.last: Output | None = None
        self.stop: str | None = None
        self._index = index
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None
        self._tokens = bytearray()
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def take(self, tokens: bytes) -> bool:
        """New tokens. True: they complete a stop text, and nothing after it counts."""
        if self.stop is not None:
            return False
        if self._scanner is None:
            self._tokens += tokens
            return False
        for token_id in unpack_tokens(tokens):
            self._tokens += token_id.to_bytes(TOKEN_BYTES, "little")
            scanned = self._scanner.feed(self._detokenizer.feed([token_id]))
            self._text.append(scanned.text)
            if scanned.stop is not None:
                self.stop = scanned.stop
                return True
        return False

    def take_output(self, output: Output) -> bool:
        """As `take`."""
        self._logprobs += output.logprobs
        completes = self.take(output.tokens)
        if output.finish is not None:
            self.last = output
            self._finish_text(output)
        return completes

    def _finish_text(self, output: Output) -> None:
        if self.stop is not None:
            return
        self._tokens += output.stop_token
        if self._scanner is None:
            ids = unpack_tokens(bytes(self._tokens))
            self._text.append(self._detokenizer.feed(ids[: len(ids) - len(output.stop_token) // TOKEN_BYTES]))
            self._text.append(self._detokenizer.flush())
            return
        scanned = self._scanner.feed(self._detokenizer.flush())
        self._text.append(scanned.text)
        self.stop = scanned.stop
        if scanned.stop is None:
            self._text.append(self._scanner.flush())

    def completion(self) -> Completion:
        """After the last output."""
        assert self.last is not None
        ids = unpack_tokens(bytes(self._tokens))
        stopped = self.stop is not None or self.last.finish is Finish.STOP
        reason: FinishReason = "stop" if stopped else "length"
        by: str | int | None = self.stop
        if by is None and self.last.stop_token:
            by = int.from_bytes(self.last.stop_token, "little")
        num_prompt = len(self.request.tokens) // TOKEN_BYTES
        usage = Usage(num_prompt, self.last.num_cached_tokens, len(ids))
        wanted = self.request.sampling.num_logprobs is not None
        logprobs = self._of_positions(num_prompt, ids) if wanted else None
        return Completion(self._index, "".join(self._text), ids, reason, by, usage, logprobs)

    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of the prompt's tokens from the second on."""
        return self._of_positions(1, unpack_tokens(self.request.tokens)[1:])

    def _of_positions(self, first: int, ids: list[int]) -> list[TokenLogprob]:
        found = dict(unpack_logprobs(self._logprobs))
        places = range(first, first + len(ids))
        return [TokenLogprob(ids[place - first], *found[place]) for place in places if place in found]


def unpack_logprobs(packed: Iterable[TokenLogprobs]) -> Iterable[tuple[int, tuple[float, dict[int, float]]]]:
    """Position, log-probability of the token there, and those of the likeliest."""
    for run in packed:
        chosen = np.frombuffer(run.chosen, "<f4").tolist()
        ids = np.frombuffer(run.top_ids, "<u4").reshape(len(chosen), -1).tolist() if run.num_top else []
        top = np.frombuffer(run.top, "<f4").reshape(len(chosen), -1).tolist() if run.num_top else []
        for place, logprob in enumerate(chosen):
            likeliest = dict(zip(ids[place], top[place], strict=True)) if run.num_top else {}
            yield run.first_position + place, (logprob, likeliest)
