"""Who asks what, and what became of it.

Prompts are made of runs that several requests of several domains share, so that prefixes are found again and a leak
between domains would be seen. Each accepted request must have exactly one outcome, and its tokens must be a prefix of
the reference (all of it when it completed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
from msgspec.structs import replace

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams, TokenLogprobs
from coppice_scheduler.core.state.request import (
    Finish,
    Granted,
    Output,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
    Resumed,
    TokenBatch,
)
from coppice_sim.base.environment import Environment
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.kv_honest import VOCABULARY, logprobs_of, reference, salt_of_domain
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.traffic.demands import Demands
from coppice_sim.traffic.moves import Moves
from coppice_sim.traffic.observer import Observer

NUM_RUNS = 6
MOVES_MAX = 3
_REFUSED_ON_THE_MOVE = (RefusedReason.TENANT_REMOVED, RefusedReason.QUARANTINED, RefusedReason.NEVER_FITS)


@dataclass(slots=True)
class Ask:
    """One request as its client sees it."""

    request: Request
    host: SchedulerHost
    expected: list[int]
    told: list[int]  # prompt and expected tokens, and the stop token if one ends it
    num_logprobs: int  # of `told`, those before this one were reported
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    num_cached: int | None = None  # prompt tokens that the first grant found, as it was told
    num_moves: int = 0
    came_ns: int = 0  # to the scheduler that has it
    last: Output | None = None  # with its outcome
    refusal: Refused | None = None

    @property
    def logprobs_end(self) -> int:
        """Of `told`, those before this one are reported when all has come."""
        wants_output = self.request.sampling.num_logprobs is not None
        return len(self.told) if wants_output else len(self.request.tokens) // 4


class Workload:
    """`observer`: hears what its tenant is told. What others send may end at no stop token then: in which token it is
    written would count."""

    def __init__(
        self,
        env: Environment,
        domains: tuple[str, ...],
        max_context: int,
        demands: Demands | None,
        observer: Observer | None = None,
    ) -> None:
        self._rng = rng = env.rng
        self._record = env.record
        self._vocabulary = env.vocabulary
        self._domains = domains
        self._max_context = max_context
        self._demands = demands
        self._observer = observer
        self.asks: dict[str, Ask] = {}
        self._by_number: list[Ask] = []
        self.num_open = 0
        self.num_refused = 0
        self._moves = Moves(env)
        self._runs = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, max_context // 3))] for _ in range(NUM_RUNS)
        ]

    def submit(self, host: SchedulerHost) -> None:
        """One request from a random tenant, or several continuations of its prompt."""
        rng = self._rng
        domain = rng.choice(self._domains)
        tokens = self._a_prompt(rng)
        num_forks = rng.choice((0, 0, 0, 1, 1, 3))
        leader = self._submit_one(host, domain, tokens, None, wanted=rng.choice((8, 24)) if num_forks else 0)
        for _ in range(num_forks):
            if host.is_alive:
                # A fork that names a request of another tenant, by mistake or not, is none.
                stranger = rng.random() < 0.1
                of_domain = rng.choice(self._domains) if stranger else domain
                self._submit_one(host, of_domain, tokens, leader)

    def _submit_one(
        self, host: SchedulerHost, domain: str, tokens: list[int], fork_of: str | None, *, wanted: int = 0
    ) -> str:
        """`wanted` tokens, or some. Returns its id."""
        rng = self._rng
        tokens = self._written(domain, tokens)
        packed = np.array(tokens, "<u4").tobytes()
        seed = rng.randrange(1 << 62)
        room = self._max_context - len(tokens)
        wanted = min(room, wanted or rng.choice((1, 2, 4, 8, 24)))
        salt = salt_of_domain(domain)
        expected = reference(packed, wanted, seed=seed, salt=salt, vocabulary=self._vocabulary)
        stops = frozenset({rng.choice(expected)}) if rng.random() < 0.2 else frozenset()
        if self._observer is not None and domain != self._observer.tenant:
            stops = frozenset()
        streams = rng.random() < 0.6
        request = Request(
            request_id=f"r{len(self.asks)}",
            tenant=domain,
            domain=DomainId(domain),
            tokens=packed,
            sampling=SamplingParams(temperature=0.0, seed=seed),
            max_new_tokens=wanted,
            stop_token_ids=stops,
            arrived_ns=host.now_ns,
            number=len(self.asks),
            streams=streams,
            deadline_ns=host.now_ns + rng.randrange(20, 3_000) * MS if rng.random() < 0.1 else None,
            fork_of=fork_of,
        )
        if self._demands is not None:
            request = self._demands.wanted(request)
        told = tokens + expected
        if stops:
            end = next(i for i, token in enumerate(expected) if token in stops)
            expected, told = expected[:end], told[: len(tokens) + end + 1]
        self.enter(
            Ask(request, host, expected, told, len(tokens) if request.sampling.num_prompt_logprobs is None else 1)
        )
        return request.request_id

    def enter(self, ask: Ask) -> None:
        """Its client sends it."""
        self.asks[ask.request.request_id] = ask
        self._by_number.append(ask)
        self.num_open += 1
        ask.came_ns = ask.host.now_ns
        refused = ask.host.submit(ask.request)
        if refused is not None:
            self._told(ask, refused)
            ask.refusal = refused
            self.num_refused += 1
            self._close(ask, "refused")

    def a_prompt(self, rng: Random, domain: str) -> list[int]:
        """As the tenant writes it."""
        return self._written(domain, self._a_prompt(rng))

    def _written(self, domain: str, tokens: list[int]) -> list[int]:
        return tokens if self._observer is None else self._observer.written(domain, tokens)

    def _told(self, ask: Ask, what: object) -> None:
        """Whatever its client hears, when, and what else its tenant can see then."""
        request, host = ask.request, ask.host
        if self._observer is not None and request.tenant == self._observer.tenant:
            stats = host.core.stats().tenants.get(request.tenant)
            self._observer.hear((host.now_ns, request.request_id, what, stats))

    def _a_prompt(self, rng: Random) -> list[int]:
        """Of runs that others share."""
        tokens = list(self._runs[rng.randrange(NUM_RUNS)])
        if rng.random() < 0.5:
            tokens += self._runs[rng.randrange(NUM_RUNS)]
        tokens += [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 3, 8)))]
        return tokens[: self._max_context - 1]

    def cancel_one(self) -> None:
        """Some client hangs up. Its word takes a while to arrive, and may come too late."""
        asks = [ask for ask in self.asks.values() if not ask.outcome]
        if asks:
            ask, rng = self._rng.choice(asks), self._rng
            ask.host.after(int(rng.expovariate(1.0) * 10 * MS), lambda: self._cancel(ask))

    def _cancel(self, ask: Ask) -> None:
        if ask.outcome:
            self._record.sometimes["cancel loses to finish"] += 1
        if ask.host.is_alive:
            ask.host.cancel(ask.request.request_id)
        elif not ask.outcome:  # its front door brings it nowhere
            self._close(ask, "cancelled")

    def tokens(self, batch: TokenBatch) -> None:
        numbers, tokens = np.frombuffer(batch.numbers, "<u4"), np.frombuffer(batch.tokens, "<u4")
        for number, token in zip(numbers.tolist(), tokens.tolist(), strict=True):
            self._told(self._by_number[number], token)
            self._take(self._by_number[number], [token])

    def _take(self, ask: Ask, tokens: list[int]) -> None:
        name = ask.request.request_id
        if ask.outcome:
            self._record.fail("I16", f"{name} had its outcome ({ask.outcome}) and then {tokens}")
        ask.tokens += tokens
        if ask.tokens != ask.expected[: len(ask.tokens)]:
            self._record.fail("I12", f"{name} of {ask.request.domain}: got {ask.tokens}, expected {ask.expected}")

    def _take_logprobs(self, ask: Ask, reported: TokenLogprobs) -> None:
        """Each position once, in order, and what is said there is about the token that is there."""
        name, first, count = ask.request.request_id, reported.first_position, len(reported.chosen) // 4
        if first != ask.num_logprobs or first + count > len(ask.told):
            self._record.fail(
                "O3", f"{name}: log-probabilities of {count} tokens from {first}, after {ask.num_logprobs}"
            )
        wanted = logprobs_of(np.array(ask.told[first : first + count], np.int64), reported.num_top)
        if (reported.chosen, reported.top) != (wanted.chosen.tobytes(), wanted.top.tobytes()):
            self._record.fail("I12", f"{name}: log-probabilities at {first} are those of other tokens")
        of_prompt = first < len(ask.request.tokens) // 4
        if reported.ranks != (wanted.ranks.tobytes() if of_prompt and wanted.ranks is not None else b""):
            self._record.fail("I12", f"{name}: ranks at {first} are those of other tokens")
        num_top = ask.request.sampling.num_prompt_logprobs if of_prompt else ask.request.sampling.num_logprobs
        if reported.num_top != num_top:
            self._record.fail("O3", f"{name}: {reported.num_top} likeliest tokens at {first} for {num_top}")
        ask.num_logprobs += count
        self._record.sometimes["log-probabilities"] += 1

    def output(self, output: Output) -> None:
        ask = self.asks[output.request_id]
        self._told(ask, output)
        if output.num_prompt_tokens and self._observer is None:  # whose run tells by itself
            self._take_usage(ask, output)
        self._take(ask, np.frombuffer(output.tokens, "<u4").tolist())
        for reported in output.logprobs:
            self._take_logprobs(ask, reported)
        if output.finish is not None:
            self._finished(ask, output)

    def granted(self, granted: Granted) -> None:
        ask = self.asks[granted.request_id]
        if ask.num_cached is not None:
            self._record.fail("O3", f"{granted.request_id} had its first grant before")
        ask.num_cached = granted.num_cached_tokens

    def _take_usage(self, ask: Ask, output: Output) -> None:
        """Of the prompt, the same is told each time, whoever tells it; of the output, what was told of it."""
        name, num_prompt = ask.request.request_id, len(ask.request.tokens) // 4
        if output.num_prompt_tokens != num_prompt:
            self._record.fail("O3", f"{name}: {output.num_prompt_tokens} tokens of the prompt are {num_prompt}")
        if ask.num_cached is not None and output.num_cached_tokens != ask.num_cached:
            self._record.fail("O3", f"{name}: {output.num_cached_tokens} cached tokens were {ask.num_cached}")
        if output.finish in (Finish.STOP, Finish.LENGTH) and output.num_output_tokens != len(ask.told) - num_prompt:
            self._record.fail("O3", f"{name}: {output.num_output_tokens} tokens counted, {ask.told} told")

    def _take_stages(self, ask: Ask, output: Output) -> None:
        """They tell all of the time that it was at its scheduler, without a gap."""
        ends = [stage.end_ns for stage in output.stages]
        if [stage.start_ns for stage in output.stages[1:]] != ends[:-1]:
            self._record.fail("O5", f"{ask.request.request_id}: stages with a gap: {output.stages}")
        came_ns = output.stages[0].start_ns if output.stages else ask.host.now_ns
        if came_ns != ask.came_ns or (ends and ends[-1] != ask.host.now_ns):
            self._record.fail("O5", f"{ask.request.request_id} came at {ask.came_ns}: {output.stages}")

    def _finished(self, ask: Ask, output: Output) -> None:
        finish = output.finish
        ask.last = output
        self._take_stages(ask, output)
        complete = ask.tokens == ask.expected
        if finish in (Finish.STOP, Finish.LENGTH) and not complete:
            self._record.fail("O3", f"{ask.request.request_id} ended with {finish} after {ask.tokens}: {ask.expected}")
        if finish in (Finish.STOP, Finish.LENGTH) and ask.num_logprobs != ask.logprobs_end:
            self._record.fail("O3", f"{ask.request.request_id}: log-probabilities end at {ask.num_logprobs}")
        self._record.sometimes["cancel wins"] += finish is Finish.CANCELLED
        if output.error is not None:
            self._record.sometimes[f"error: {output.error.code.value}"] += 1
            if output.error.code is OutputErrorCode.INTERNAL:
                self._record.internal_errors.append(f"{ask.request.request_id}: {output.error.message}")
        assert finish is not None
        self._close(ask, finish.value)

    def started(self, host: SchedulerHost) -> None:
        self._moves.started(host)

    def crashed(self, host: SchedulerHost) -> None:
        """Its requests go on elsewhere."""
        self._moves.bring(lambda to: self._move_all(host, to))

    def _move_all(self, lost: SchedulerHost, to: SchedulerHost) -> None:
        for ask in [ask for ask in self.asks.values() if ask.host is lost and not ask.outcome]:
            if ask.num_moves == MOVES_MAX:
                self._told(ask, "broken stream")
                self._close(ask, "broken stream")
            else:
                self._move(ask, to)

    def _move(self, ask: Ask, to: SchedulerHost) -> None:
        ask.num_moves += 1
        ask.host = to
        ask.came_ns = to.now_ns
        sent = np.array(ask.tokens, "<u4").tobytes()
        num_reported = ask.num_logprobs if ask.request.sampling.num_prompt_logprobs is not None or sent else 0
        resumed = Resumed(sent, num_reported, ask.num_cached, ask.num_moves)
        self._record.sometimes["moved behind output" if sent else "moved before output"] += 1
        refused = to.submit(replace(ask.request, resumed=resumed))
        if refused is not None:
            if refused.reason not in _REFUSED_ON_THE_MOVE:
                self._record.fail("O3", f"{ask.request.request_id} was taken before: {refused}")
            self._told(ask, refused)
            self._close(ask, "refused on the move")

    def _close(self, ask: Ask, outcome: str) -> None:
        ask.outcome = outcome
        self.num_open -= 1
