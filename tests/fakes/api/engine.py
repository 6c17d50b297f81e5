"""An engine without workers: it plays a script per request, and remembers what happened to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np

from coppice.ids import SequenceId
from coppice.messages.step import TokenLogprobs
from coppice.request_log.stages import Stage
from coppice_scheduler.core.state.request import (
    Chunk,
    Finish,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    Request,
    SchedulerStats,
    TenantLimitsLeft,
)
from coppice_scheduler.edge.base.engine import EngineLost, ModelInfo, RequestRefused
from coppice_scheduler.edge.base.idempotency import Claim, Claimed, FirstOutcome, Settled
from coppice_scheduler.edge.processes.answer_table import AnswerTable, Told


def pack(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def unpack(tokens: bytes) -> list[int]:
    return [int(i) for i in np.frombuffer(tokens, dtype="<u4")]


def logprob_of(token_id: int, rank: int = 0) -> float:
    """Of a chosen token (rank 0), or of the likely token of this rank; exact in 32 bits."""
    return -(token_id % 64 + rank) / 8


def likely_ids(token_id: int, num_top: int) -> list[int]:
    """What is reported as likeliest beside `token_id`."""
    return [token_id ^ rank for rank in range(num_top)]


def rank_of(token_id: int) -> int:
    return token_id % 64 + 1


def report(ids: list[int], first_position: int, num_top: int, *, ranks: bool = False) -> TokenLogprobs:
    """Log-probabilities as a worker reports them, a function of the tokens."""
    top = [likely_ids(token_id, num_top) for token_id in ids]
    return TokenLogprobs(
        SequenceId(1),
        first_position,
        num_top,
        np.array([logprob_of(i) for i in ids], dtype="<f4").tobytes(),
        np.array(top, dtype="<u4").tobytes(),
        np.array([[logprob_of(i, rank) for rank in range(num_top)] for i in ids], dtype="<f4").tobytes(),
        np.array([rank_of(i) for i in ids], dtype="<u4").tobytes() if ranks else b"",
    )


@dataclass(frozen=True)
class Script:
    """What to answer: the tokens, then the end that the fields name."""

    tokens: list[int]
    stop_token: bool = True  # an end token after `tokens`, where max_new_tokens has room for it
    tokens_per_output: int = 1
    num_cached_tokens: int = 0
    num_written_tokens: int = 0
    refused: Refused | None = None
    undecided_s: float = 0.0  # before it is refused
    error: OutputError | None = None  # after `tokens`
    hangs: bool = False  # after `tokens`, until finished, ended or cancelled
    stages: tuple[Stage, ...] = ()
    chunks: tuple[Chunk, ...] = ()


def echo(request: Request) -> Script:
    """The prompt again, and again, as long as it may."""
    prompt = unpack(request.tokens)
    return Script((prompt * (request.max_new_tokens // len(prompt) + 1))[: request.max_new_tokens], stop_token=False)


@dataclass
class FakeEngine:
    """Implements `Engine`. Safe to look at from another thread than the loop's."""

    model: ModelInfo
    script: Callable[[Request], Script] = echo
    ready: bool = True
    requests: list[Request] = field(default_factory=list)  # but for those that are calls
    open_calls: list[Request] = field(default_factory=list)  # that came, not only those that are open
    finished_early: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_running: int = 0
    limits_left: dict[str, TenantLimitsLeft] = field(default_factory=dict)
    tenants_refused: bool = False
    ended_with: dict[str, OutputError] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop | None = None  # of the front door, from its first request on
    running: dict[str, Request] = field(default_factory=dict)
    aborts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # (tenant, names), as asked for
    lost: OutputError | None = None  # what aborts fail with
    answers: AnswerTable = field(default_factory=AnswerTable)
    num_claims: int = 0
    some_claimed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _claims: dict[int, asyncio.Future[Claimed]] = field(default_factory=dict)
    _hanging: dict[str, asyncio.Event] = field(default_factory=dict)
    max_running: int = 0
    some_cancelled: threading.Event = field(default_factory=threading.Event)
    some_hanging: threading.Event = field(default_factory=threading.Event)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self.loop = asyncio.get_running_loop()
        if request.num_places:
            yield await self._ended(request)
            return
        self.requests.append(request)
        script = self.script(request)
        if script.refused is not None:
            await asyncio.sleep(script.undecided_s)
            raise RequestRefused(script.refused)
        self.num_running += 1
        self.running[request.request_id] = request
        self.max_running = max(self.max_running, self.num_running)
        ended = False
        try:
            if request.streams:
                yield Output(request.request_id, b"")
            async for output in self._play(request, script):
                ended = output.finish is not None
                yield output
        finally:
            self.num_running -= 1
            del self.running[request.request_id]
            if not ended:
                self.cancelled.append(request.request_id)
                self.some_cancelled.set()

    async def _ended(self, call: Request) -> Output:
        """An open call says nothing until somebody ends it."""
        self.open_calls.append(call)
        self.running[call.request_id] = call
        self._hanging[call.request_id] = asyncio.Event()
        try:
            await self._hanging[call.request_id].wait()
        finally:
            del self.running[call.request_id]
        return Output(call.request_id, b"", Finish.ERROR, self.ended_with[call.request_id])

    async def _play(self, request: Request, script: Script) -> AsyncGenerator[Output, None]:
        sent = 0
        tokens = script.tokens[: request.max_new_tokens]
        while sent < len(tokens):
            await asyncio.sleep(0)
            if request.request_id in self.finished_early:
                break
            new = tokens[sent : sent + script.tokens_per_output]
            sent += len(new)
            if request.streams:
                told = _reports(request, new, sent - len(new))
                yield Output(request.request_id, pack(new), num_output_tokens=sent, logprobs=told)
        if script.hangs and request.request_id not in {*self.finished_early, *self.ended_with}:
            self._hanging[request.request_id] = asyncio.Event()
            self.some_hanging.set()
            await self._hanging[request.request_id].wait()
        await asyncio.sleep(0)
        yield self._last(request, script, tokens[:sent])

    def _last(self, request: Request, script: Script, tokens: list[int]) -> Output:
        error = self.ended_with.get(request.request_id, script.error)
        sent, new = len(tokens), [] if request.streams else tokens
        early = request.request_id in self.finished_early
        stop = script.stop_token and not early and bool(request.stop_token_ids) and sent < request.max_new_tokens
        finish = Finish.STOP if early or stop else Finish.LENGTH
        return Output(
            request.request_id,
            pack(new),
            logprobs=_reports(request, new, 0) if new else (),
            finish=Finish.ERROR if error is not None else finish,
            error=error,
            num_prompt_tokens=len(request.tokens) // 4,
            num_cached_tokens=script.num_cached_tokens,
            num_written_tokens=script.num_written_tokens,
            num_output_tokens=sent + stop,
            stop_token=min(request.stop_token_ids).to_bytes(4, "little") if stop else b"",
            stages=script.stages,
            chunks=script.chunks,
        )

    def finish(self, request_id: str) -> None:
        self.finished_early.append(request_id)
        if request_id in self._hanging:
            self._hanging[request_id].set()

    def end(self, request_id: str, error: OutputError) -> None:
        self.ended_with[request_id] = error
        if request_id in self._hanging:
            self._hanging[request_id].set()

    def let_go(self, request_id: str) -> None:
        """One that hangs comes to its end."""
        self._hanging[request_id].set()

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        self.aborts.append((tenant, names))
        if self.lost is not None:
            raise EngineLost(self.lost)
        meant = [one for one in self.running.values() if one.tenant == tenant and set(names) & set(one.names)]
        for request in meant:
            self.end(request.request_id, OutputError(OutputErrorCode.ABORTED, "The request was aborted."))
        return len(meant)

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
        if self.lost is not None:
            raise EngineLost(self.lost)
        self.num_claims += 1
        number = self.num_claims
        answer: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        self._claims[number] = answer
        self._tell(self.answers.claim(0, Claim(number, tenant, key, call, is_strict), 0))
        self.some_claimed.release()
        return await answer

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        self._tell(self.answers.settle(0, Settled(number, outcome), 0))

    def _tell(self, told: list[Told]) -> None:
        for _, claimed in told:
            self._claims.pop(claimed.number).set_result(claimed)

    @property
    def accepts(self) -> bool:
        return self.ready

    def stats(self) -> SchedulerStats:
        return SchedulerStats(self.num_running, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0, limits_left=self.limits_left)


def _reports(request: Request, new: list[int], num_before: int) -> tuple[TokenLogprobs, ...]:
    """Of new output tokens, and before the first of them of the prompt, in two parts as chunks would make them."""
    num_top, num_prompt_top = request.sampling.num_logprobs, request.sampling.num_prompt_logprobs
    prompt = unpack(request.tokens)
    told = () if num_top is None else (report(new, len(prompt) + num_before, num_top),)
    if num_before or num_prompt_top is None:
        return told
    half = 1 + len(prompt[1:]) // 2
    parts = [(prompt[1:half], 1), (prompt[half:], half)]
    return (*(report(ids, first, num_prompt_top, ranks=True) for ids, first in parts if ids), *told)
