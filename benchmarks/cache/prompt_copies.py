"""What one long prompt costs in memory and in copies, from the front door's message to the worker's and the cache's.

    front door --Asks--> planner --Acquire--> cache service --Grant--> planner --StepPlan--> worker
                         planner --Publish--> cache service                    (its result: the prompt is computed)

    python -m benchmarks.cache.prompt_copies [--tokens 100000] [--json]

The cores, codecs and framing are the services' own; sockets are buffers in this process, which stand for the kernel's.
All numbers are lengths of the prompt, from `tracemalloc`: `copies` is what each act has allocated at its highest point
beyond what was there before it, `held` what stays while the request waits, or decodes. The prompt is computed in one
step, and blocks are large, so that what else a step allocates, and handles and seals, hardly count. `held_by_forks` is
what the planner holds for eight continuations of one prompt that wait.
"""

from __future__ import annotations

import argparse
import json
import socket
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from coppice.edge.codec import INDEX, STEPS, Codec
from coppice.edge.wire import Wire, packed
from coppice.ids import CacheEpoch, DomainId, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import AnswerBatch, OpBatch, WorkerInfo, Workers
from coppice.messages.step import SamplingParams, StepResult
from coppice.session.frames import Data
from coppice_bench.report import describe_run
from coppice_bench.rpc.client import NAMESPACE, WORKER, registration
from coppice_cache.core.base.results import ToClientEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.edge.ipc.door_messages import DOOR_TO_PLANNER, Asks

T = TypeVar("T")
BLOCK = 1_024
DOMAIN = DomainId("bench")
EPOCH = CacheEpoch(1)
FORKS = 8
BUFFER_BYTES = 64 * 1024 * 1024


class Buffer:
    """A connection whose other end is this buffer: what was sent is received, in pieces as large as are asked for."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self._ready, self._other = socket.socketpair()
        self._other.send(b"\0")  # never read: `poll` finds something at any time
        self._bytes = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self.wire = Wire(cast(socket.socket, self))
        self.wire.trust()

    def fileno(self) -> int:
        return self._ready.fileno()

    def setblocking(self, blocking: bool) -> None: ...

    def send(self, data: bytes) -> int:
        self._bytes[self._end : self._end + len(data)] = data
        self._end += len(data)
        return len(data)

    def recv(self, most: int) -> bytes:
        end = min(self._end, self._start + most)
        data = bytes(self._bytes[self._start : end])
        self._start = end
        return data

    def first(self) -> bytes | memoryview:
        """The next message of those that were written, as it was received."""
        while not (messages := self.wire.receive(1.0)):
            pass
        return messages[0]


class Party:
    """One process: what its acts allocate, and what it holds, in bytes."""

    def __init__(self) -> None:
        self.copies: dict[str, int] = {}
        self.held = self.peak = 0

    def act(self, name: str, work: Callable[[], T]) -> T:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        made = work()
        after, peak = tracemalloc.get_traced_memory()
        self.copies[name] = self.copies.get(name, 0) + peak - before
        self.peak = max(self.peak, self.held + peak - before)
        self.held += after - before
        return made

    def read(self, name: str, buffer: Buffer, codec: Codec[Any], take: Callable[[Any], None]) -> None:
        """One message comes and is acted upon."""
        data = [self.act(f"{name}: receive", buffer.first)]
        message = [self.act(f"{name}: decode", lambda: codec.decode(data[0]))]
        self.act("", data.clear)
        self.act(f"{name}: take", lambda: take(message[0]))
        self.act("", message.clear)

    def write(self, name: str, buffer: Buffer, codec: Codec[Any], body: Any) -> None:
        data = [self.act(f"{name}: encode", lambda: codec.encode(Data(1, 1, 0, body)))]
        self.act(f"{name}: send", lambda: buffer.wire.write(data[0]))
        self.act("", data.clear)


class Journey:
    """One prompt from hop to hop."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.planner, self.cache = Party(), Party()
        self.door, self.index, self.steps = Buffer(), Buffer(), Buffer()
        self.scheduler = SchedulerCore(
            SchedulerSettings(
                instance=b"instance",
                max_context=2 * num_tokens,
                max_step_tokens=2 * num_tokens,
                max_chunk_tokens=2 * num_tokens,
                contested_prefill_tokens=2 * num_tokens,
                max_queued_tokens=1 << 40,
            )
        )
        num_blocks = 2 * FORKS * num_tokens // BLOCK
        settings = CoreSettings(b"k" * 32, default_domain=DomainConfig(DOMAIN))
        self.core = IndexCore(settings, EPOCH, 1)
        self.core.receive_worker(WORKER, registration(num_blocks, BLOCK), 1)
        self.session = self.core.attach_client(SchedulerEpoch(0), 1)
        self.core.take_effects()
        (worker,) = self.core.state.workers.values()
        self.worker = WorkerInfo(WORKER, worker.epoch, "here:0", num_blocks, BLOCK, NAMESPACE, "m", True)
        self.answers: list[AnswerBatch] = []

    def ask(self, num_requests: int) -> None:
        """Put into the front door's connection; the planner has not read it."""
        tokens = np.random.default_rng(7).integers(1, 32_000, self.num_tokens, dtype=np.uint32).astype("<u4").tobytes()
        requests = tuple(
            Request(
                request_id=f"r{number}",
                tenant="t",
                domain=DOMAIN,
                tokens=tokens,
                sampling=SamplingParams(),
                max_new_tokens=2,
                number=number + 1,
                fork_of="r0" if number else None,
            )
            for number in range(num_requests)
        )
        self.door.send(packed(DOOR_TO_PLANNER.encode(Asks(requests, ()))))

    def read_asks(self) -> None:
        self.planner.read("request", self.door, DOOR_TO_PLANNER, self._submit)
        self.held_queued = self.planner.held

    def _submit(self, asks: Asks) -> None:
        for request in asks.requests:
            refused = self.scheduler.submit(request, 1)
            assert refused is None, refused

    def run(self) -> None:
        """After `read_asks`."""
        self._attach()
        self._planner_decides("acquire")
        self._cache_executes("acquire")
        self._planner_decides("plan")
        self._worker_computes()
        self._planner_decides("publish")
        self._cache_executes("publish")
        self._planner_decides("end")
        self.held_running = self.planner.held

    def _attach(self) -> None:
        """Until here nothing can run, so what was asked waits."""
        self.scheduler.index_attached(SchedulerEpoch(1), EPOCH, True, 1)
        self.scheduler.index_message(Workers(EPOCH, (self.worker,)), 1)
        self.scheduler.worker_attached(WORKER, WorkerEpoch(self.worker.worker_epoch), True, 1)

    def _planner_decides(self, name: str) -> None:
        planner = self.planner
        planner.act("answers", self._take_answers)
        effects = [planner.act(f"{name}: decide", lambda: self.scheduler.advance(1))]
        for _, plan in effects[0].plans:
            planner.write(name, self.steps, STEPS.from_client, plan)
        for message in effects[0].to_index:
            planner.write(name, self.index, INDEX.from_client, message)
        plan = message = None  # type: ignore[assignment]
        planner.act("", effects.clear)

    def _take_answers(self) -> None:
        for answers in self.answers:
            self.scheduler.index_message(answers, 1)
        self.answers.clear()

    def _worker_computes(self) -> None:
        """The prompt, and a first token."""
        plan = STEPS.from_client.decode(self.steps.first())
        assert isinstance(plan, Data)
        result = StepResult(plan.body.step, np.uint32(1).tobytes(), np.uint32(5).tobytes())
        self.planner.act("result", lambda: self.scheduler.worker_result(WORKER, result, 1))

    def _cache_executes(self, name: str) -> None:
        self.cache.read(name, self.index, INDEX.from_client, self._execute)

    def _execute(self, frame: Data[OpBatch]) -> None:
        self.core.receive_client(self.session, frame.body, 1)
        messages = [effect.message for effect in self.core.take_effects() if isinstance(effect, ToClientEffect)]
        self.answers += [message for message in messages if isinstance(message, AnswerBatch)]


def measure(num_tokens: int) -> dict[str, Any]:
    warm, prompt, forks = Journey(10_000), Journey(num_tokens), Journey(num_tokens)
    for journey, num_requests in ((warm, 1), (prompt, 1), (forks, FORKS)):
        journey.ask(num_requests)
    tracemalloc.start()
    for journey in (warm, prompt):
        journey.read_asks()
        journey.run()
    forks.read_asks()
    tracemalloc.stop()

    def lengths(num_bytes: int) -> float:
        return round(num_bytes / (4 * num_tokens), 1)

    def copies(party: Party) -> dict[str, float]:
        found = {name: lengths(num_bytes) for name, num_bytes in party.copies.items() if name}
        return {"all": lengths(sum(party.copies.values())), **{name: count for name, count in found.items() if count}}

    planner, cache = prompt.planner, prompt.cache
    return {
        "bench": "prompt_copies",
        "prompt_tokens": num_tokens,
        "prompt_bytes": 4 * num_tokens,
        "planner": {
            "held_queued": lengths(prompt.held_queued),
            "held_running": lengths(prompt.held_running),
            "held_by_forks": lengths(forks.held_queued),
            "peak": lengths(planner.peak),
            "copies": copies(planner),
        },
        "cache": {"held_running": lengths(cache.held), "peak": lengths(cache.peak), "copies": copies(cache)},
        **describe_run(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.tokens), indent=None if chosen.json else 2))


if __name__ == "__main__":
    main()
