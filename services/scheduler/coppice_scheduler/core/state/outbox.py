"""Tokens and outcomes on their way to the clients, until the edge takes them."""

from __future__ import annotations

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice_scheduler.core.state.request import Finish, Granted, Output, OutputError, TokenBatch
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.slot_table import UInt32


class Outbox:
    def __init__(self) -> None:
        self._batches: list[TokenBatch] = []
        self._granted: list[Granted] = []
        self._outputs: list[Output] = []
        self._fresh: dict[str, RequestState] = {}  # those that get their next tokens as an Output

    @property
    def is_empty(self) -> bool:
        return not (self._granted or self._batches or self._outputs or self._fresh)

    def tokens(self, numbers: UInt32, tokens: UInt32) -> None:
        """numbers: [R], of requests; tokens: [k, R]."""
        many = np.tile(numbers, len(tokens)) if len(tokens) > 1 else numbers
        self._batches.append(TokenBatch(many.astype("<u4").tobytes(), tokens.astype("<u4").tobytes()))

    def note(self, request: RequestState) -> None:
        """What is new of it leaves as an Output."""
        self._fresh[request.request.request_id] = request

    def granted(self, request: RequestState) -> None:
        self._granted.append(Granted(request.request.request_id, request.num_cached_tokens))

    def last(
        self, request: RequestState, finish: Finish, error: OutputError | None, stop_token: bytes, now_ns: int
    ) -> None:
        self._fresh.pop(request.request.request_id, None)
        self._outputs.append(
            Output(
                request_id=request.request.request_id,
                tokens=_unsent(request),
                finish=finish,
                error=error,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens + bool(stop_token),
                stop_token=stop_token,
                stages=request.history.told(now_ns),
                chunks=tuple(request.chunks),
                logprobs=tuple(request.fresh_logprobs),
                num_written_tokens=request.num_written_tokens,
            )
        )

    def call_ended(self, request_id: str, finish: Finish, error: OutputError | None) -> None:
        self._outputs.append(Output(request_id, b"", finish, error))

    def take(self) -> tuple[tuple[Granted, ...], tuple[TokenBatch, ...], tuple[Output, ...]]:
        for request in self._fresh.values():
            self._outputs.append(_next(request))
        self._fresh.clear()
        granted, self._granted = tuple(self._granted), []
        batches, self._batches = tuple(self._batches), []
        outputs, self._outputs = tuple(self._outputs), []
        return granted, batches, outputs


def _next(request: RequestState) -> Output:
    logprobs = tuple(request.fresh_logprobs)
    request.fresh_logprobs.clear()
    return Output(
        request_id=request.request.request_id,
        tokens=_unsent(request),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        logprobs=logprobs,
    )


def _unsent(request: RequestState) -> bytes:
    """Tokens that did not leave yet; now they do."""
    num_sent = request.num_sent_tokens - request.num_prompt_tokens
    tokens = bytes(request.all_output()[num_sent * TOKEN_BYTES :])
    request.num_sent_tokens = request.num_tokens
    return tokens
