"""A scheduler core with so many sequences at work, its cache service and its worker as fakes that always say yes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from coppice.edge.codec import STEPS
from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, LeaseId, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import (
    Acquire,
    Answer,
    AnswerBatch,
    Extend,
    Extended,
    Grant,
    Op,
    OpBatch,
    Publish,
    Published,
    Released,
    WorkerInfo,
    Workers,
)
from coppice.messages.step import SamplingParams, StepPlan, StepResult
from coppice.seals import SEAL_BYTES
from coppice.session.frames import Data
from coppice_bench.plan.sampled_worker import SampledWorker
from coppice_bench.rpc.client import NAMESPACE, WORKER
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects, Output, Request, TokenBatch
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.text.detokenizer import Detokenizer, DetokenizerFactory
from coppice_scheduler.edge.text.streams import pieces

BLOCK = 16  # tokens
PREFILL_TOKENS = 8_192  # of one step: more than new requests bring
PROMPT_TOKENS = (64, 512)
OUTPUT_TOKENS = (128, 512)
STOP = 0  # the token that ends a request early
NUM_TENANTS = 8
STOPS_WITHIN = (16, OUTPUT_TOKENS[1])  # steps, of a request that ends early
STEP_NS = 20_000_000
EPOCH = CacheEpoch(1)
AS_SERVED: dict[str, Any] = {  # as the service is set where nobody says otherwise
    name: ServiceSettings.model_fields[name].default
    for name in (
        "extend_more_blocks",
        "match_window",
        "max_chunk_tokens",
        "max_overtake_ms",
        "max_steps_in_flight",
        "single_flight_wait_ms",
    )
}


def settings_for(size: int, prefill_tokens: int) -> SchedulerSettings:
    """Of a scheduler with so many at work: nobody is refused, and a step decodes all and prefills so many tokens."""
    at_once = 2 * size + 64
    return SchedulerSettings(
        instance=b"instance",
        max_running=size,
        max_step_tokens=size + prefill_tokens,
        max_queued=at_once,
        max_queued_tokens=1 << 40,
        contested_prefill_tokens=prefill_tokens,
        max_decode_steps=1,
        default_limits=TenantLimits(max_concurrency=at_once, max_queued=at_once),
        **AS_SERVED,
    )


@dataclass(slots=True)
class StepTimes:
    """Processor time of one step, in ns."""

    core: int = 0
    edge: int = 0

    @property
    def all(self) -> int:
        return self.core + self.edge


class PlanWorld:
    """`size` sequences decode; `clock` is read around what is measured."""

    def __init__(self, size: int, tokenizer: Tokenizer, clock: Callable[[], int]) -> None:
        self._size = size
        self._clock = clock
        self._random = Random(7)
        self._vocabulary = tokenizer.get_vocab_size()
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._texts: dict[int, Detokenizer] = {}  # by number of the request
        self._names: dict[str, int] = {}  # numbers of those at work
        self._worker = SampledWorker(self._random, self._vocabulary, STOP, STOPS_WITHIN)
        self._cache = _Cache()
        self._plans: deque[StepPlan] = deque()
        self._batches: deque[tuple[Op, ...]] = deque()
        self._now_ns = 0
        self._num_asked = 0
        self._core = SchedulerCore(settings_for(size, PREFILL_TOKENS))
        self._core.index_attached(SchedulerEpoch(1), EPOCH, True, 0)
        info = WorkerInfo(WORKER, WorkerEpoch(1), "here:0", 1 << 24, BLOCK, NAMESPACE, "m", True)
        self._core.index_message(Workers(EPOCH, (info,)), 0)
        self._core.worker_attached(WORKER, WorkerEpoch(1), True, 0)

    def warm_up(self) -> None:
        """Until as many have ended as run at a time: then ends and block boundaries are spread over the steps."""
        while self._num_asked < 2 * self._size + 8:
            self.step()

    def step(self) -> StepTimes:
        """One result of the worker and what follows from it."""
        times = StepTimes()
        self._now_ns += STEP_NS
        while len(self._names) < self._size:
            self._submit(times)
        if self._plans:
            self._take_result(self._worker.result(self._plans.popleft()), times)
        self._advance(times)
        while self._batches:
            ops = self._batches.popleft()
            answers = AnswerBatch(EPOCH, tuple(self._cache.answer(op) for op in ops))
            began = self._clock()
            self._core.index_message(answers, self._now_ns)
            times.core += self._clock() - began
            self._advance(times)
        return times

    # --- what the core is told

    def _submit(self, times: StepTimes) -> None:
        self._num_asked += 1
        number = self._num_asked
        length = self._random.randrange(*PROMPT_TOKENS)
        ids = np.random.default_rng(number).integers(1, self._vocabulary, length, dtype=np.uint32)
        request = Request(
            request_id=f"r{number}",
            tenant=f"t{number % NUM_TENANTS}",
            domain=DomainId(f"t{number % NUM_TENANTS}"),
            tokens=ids.astype("<u4").tobytes(),
            sampling=SamplingParams(),
            max_new_tokens=self._random.randrange(*OUTPUT_TOKENS),
            stop_token_ids=frozenset({STOP}),
            arrived_ns=self._now_ns,
            number=number,
        )
        self._names[request.request_id] = number
        self._texts[number] = self._detokenizers.start([])
        began = self._clock()
        refused = self._core.submit(request, self._now_ns)
        times.core += self._clock() - began
        assert refused is None, refused

    def _take_result(self, result: StepResult, times: StepTimes) -> None:
        message = STEPS.from_server.encode(Data(1, result.step, 1, result))
        began = self._clock()
        frame = STEPS.from_server.decode(message)
        assert isinstance(frame, Data)
        arrived = self._clock()
        self._core.worker_result(WORKER, frame.body, self._now_ns)
        times.core += self._clock() - arrived
        times.edge += arrived - began

    def _advance(self, times: StepTimes) -> None:
        began = self._clock()
        effects = self._core.advance(self._now_ns)
        decided = self._clock()
        for _, plan in effects.plans:
            STEPS.from_client.encode(Data(1, plan.step, 1, plan))
        self._to_streams(effects)
        times.core += decided - began
        times.edge += self._clock() - decided
        self._plans.extend(plan for _, plan in effects.plans)
        self._batches.extend(message.ops for message in effects.to_index if isinstance(message, OpBatch))

    def _to_streams(self, effects: Effects) -> None:
        for batch in effects.tokens:
            self._to_text(batch)
        for output in effects.outputs:
            self._to_last_text(output)

    def _to_text(self, batch: TokenBatch) -> None:
        for number, tokens in pieces(batch):
            self._texts[number].feed(np.frombuffer(tokens, "<u4").tolist())

    def _to_last_text(self, output: Output) -> None:
        assert output.finish is not None
        assert output.error is None, output.error
        text = self._texts.pop(self._names.pop(output.request_id))
        text.feed(np.frombuffer(output.tokens, "<u4").tolist())
        text.flush()


class _Cache:
    """Grants everything, finds nothing."""

    def __init__(self) -> None:
        self._blocks: dict[LeaseId, int] = {}
        self._next_block = 0

    def answer(self, op: Op) -> Answer:
        if isinstance(op, Acquire):
            owned = self._own(op.lease_id, op.reserve_tokens)
            return Grant(op.lease_id, WORKER, WorkerEpoch(1), 0, b"", b"", owned, b"")
        if isinstance(op, Extend):
            have = self._blocks[op.lease_id]
            return Extended(op.lease_id, have, self._own(op.lease_id, op.reserve_tokens), b"")
        if isinstance(op, Publish):
            count = op.num_named_blocks + len(op.tokens) // (4 * BLOCK)
            return Published(op.lease_id, op.first_block + count, self._handles(count), bytes(SEAL_BYTES * count))
        self._blocks.pop(op.lease_id, None)
        return Released(op.lease_id)

    def _own(self, lease_id: LeaseId, reserve_tokens: int) -> bytes:
        have = self._blocks.get(lease_id, 0)
        self._blocks[lease_id] = -(-reserve_tokens // BLOCK)
        return self._handles(self._blocks[lease_id] - have)

    def _handles(self, count: int) -> bytes:
        first = self._next_block
        self._next_block = (first + count) % (1 << 24)
        generation = make_generation(EPOCH, 1)
        return b"".join(pack_handle(BlockId(first + i), generation).to_bytes(8, "little") for i in range(count))
