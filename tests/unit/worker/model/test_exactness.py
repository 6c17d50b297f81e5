"""Every output is that of its prompt and its seed alone, whatever else is served, cancelled, preempted or forked.

The three real cores in one process, tiny pools, random chunk sizes: over the KV-honest model for thousands of moves,
and over a real checkpoint, whose greedy tokens `transformers` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace, WorkerId
from coppice.messages.step import SamplingParams
from coppice.request_log.stages import Preemption
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_scheduler.core.state.request import Finish, Request
from coppice_scheduler.core.state.sequences import RequestStatus
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_sim.hosts.kv_honest import KvHonest, reference
from coppice_worker.core.batch.step_batch import Executor, PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import Oracle

OPEN, TRACKLESS = DomainId("open"), DomainId("trackless")
MAX_CONTEXT = 48
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Sizes:
    """What must not matter."""

    num_blocks: int = 20
    max_running: int = 6
    max_step_tokens: int = 16
    max_chunk_tokens: int = 16
    max_steps_in_flight: int = 2
    extend_ahead_blocks: int = 1
    extend_more_blocks: int = 0


SIZES = st.builds(
    Sizes,
    num_blocks=st.integers(13, 40),
    max_running=st.integers(1, 8),
    max_step_tokens=st.integers(8, 40),
    max_chunk_tokens=st.integers(1, 24),
    max_steps_in_flight=st.integers(1, 3),
    extend_ahead_blocks=st.integers(0, 2),
    extend_more_blocks=st.integers(0, 3),
)


@dataclass
class Served:
    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Stage:
    """A `LocalEngine` with a clock of its own, and everything that it says."""

    def __init__(self, executor: Executor, sizes: Sizes) -> None:
        self.now_ns = 1
        self.served: list[Served] = []
        pool = PoolSpec(sizes.num_blocks, BLOCK_SIZE)
        worker = WorkerCoreSettings(
            WorkerId("w"), "here", pool, Namespace(b"n"), "m", max_sequences=8, max_context=MAX_CONTEXT
        )
        scheduler = SchedulerSettings(
            instance=b"instance",
            max_running=sizes.max_running,
            max_step_tokens=sizes.max_step_tokens,
            max_chunk_tokens=sizes.max_chunk_tokens,
            max_steps_in_flight=sizes.max_steps_in_flight,
            extend_ahead_blocks=sizes.extend_ahead_blocks,
            extend_more_blocks=sizes.extend_more_blocks,
            max_context=MAX_CONTEXT,
        )
        domains = (DomainConfig(OPEN), DomainConfig(TRACKLESS, Mode.DISABLED))
        index = CoreSettings(seal_key=b"k" * 16, domains=domains)
        self.engine = LocalEngine(executor, EngineSettings(index, scheduler, worker), lambda: self.now_ns)
        self.life = self.engine._scheduler._life
        self.num_copies = 0

    def submit(
        self, prompt: list[int], max_new: int, *, domain: DomainId, seed: int, fork_of: str | None, temperature: float
    ) -> str:
        number = len(self.served)
        request = Request(
            request_id=str(number),
            tenant=domain,
            domain=domain,
            tokens=np.array(prompt, "<u4").tobytes(),
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_new_tokens=max_new,
            number=number,
            streams=bool(seed % 2),
            fork_of=fork_of,
        )
        self.served.append(Served(request))
        assert self.engine.submit(request) is None
        return request.request_id

    def cancel(self, which: int) -> None:
        if self.served:
            self.engine.cancel(self.served[which % len(self.served)].request.request_id)

    def preempt(self, which: int) -> None:
        running = [r for r in self.life.requests.values() if r.status is RequestStatus.RUNNING]
        if running:
            self.life.preempt(running[which % len(running)], Preemption.POOL, self.now_ns)

    def turn(self) -> None:
        self.now_ns += 2_000_000
        told = self.engine.advance()
        for batch in told.tokens:
            for number, token in zip(_u32(batch.numbers), _u32(batch.tokens), strict=True):
                self.served[number].tokens.append(token)
        for output in told.outputs:
            one = self.served[int(output.request_id)]
            assert one.finish is None
            one.tokens += _u32(output.tokens)
            one.finish = output.finish
        starts = [start for plan in self.engine._plans for start in plan.attach]
        self.num_copies += sum(bool(start.copy_from or start.copy_source) for start in starts)
        self.engine.step()
        self.engine.check()

    def rest(self) -> None:
        for _ in range(5_000):
            if self.engine.is_idle:
                return
            self.turn()
        raise AssertionError("it does not come to rest")


def _u32(packed: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(packed, "<u4")]


@dataclass(frozen=True)
class Move:
    """What happens to a stage: a family comes, one goes, one is preempted, or steps are computed."""

    kind: str
    which: int
    stem: int = 0
    length: int = 1
    max_new: tuple[int, ...] = ()
    domain: DomainId = OPEN


FAMILIES = st.builds(
    Move,
    kind=st.just("submit"),
    which=st.integers(0, 1 << 30),
    stem=st.integers(0, 2),
    length=st.integers(1, 30),
    max_new=st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple),
    domain=st.sampled_from((OPEN, OPEN, TRACKLESS)),
)
OTHERS = st.builds(Move, kind=st.sampled_from(("cancel", "preempt", "steps", "steps")), which=st.integers(0, 1 << 30))
MOVES = st.lists(st.one_of(FAMILIES, OTHERS), min_size=1, max_size=25)


def play(stage: Stage, moves: list[Move], stems: list[list[int]], temperature: float) -> None:
    for move in moves:
        if move.kind == "submit":
            prompt, leader = stems[move.stem][: move.length], None
            for place, max_new in enumerate(move.max_new):
                fork_of, seed = (leader if place else None), move.which + place
                name = stage.submit(
                    prompt, max_new, domain=move.domain, seed=seed, fork_of=fork_of, temperature=temperature
                )
                leader = leader or name
        elif move.kind == "steps":
            for _ in range(move.which % 6):
                stage.turn()
        else:
            getattr(stage, move.kind)(move.which)
    stage.rest()


def assert_exact(stage: Stage, right: Callable[[Served], None]) -> None:
    for one in stage.served:
        assert one.finish in (Finish.LENGTH, Finish.CANCELLED), one
        if one.finish is Finish.LENGTH:
            assert len(one.tokens) == one.request.max_new_tokens
        right(one)


def _as_alone(one: Served) -> None:
    expected = reference(one.request.tokens, len(one.tokens), seed=one.request.sampling.seed, salt=0)
    assert one.tokens == expected, one.request


STEMS = [[(7 * number + place * place) % 90 for place in range(30)] for number in range(3)]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES, moves=MOVES)
@example(sizes=Sizes(), moves=[Move("submit", 0, max_new=(1,)), Move("cancel", 0)])  # gone before any turn
def test_tokens_are_those_of_the_prompt_and_the_seed_alone(sizes: Sizes, moves: list[Move]) -> None:
    stage = Stage(KvHonest(PoolSpec(sizes.num_blocks, BLOCK_SIZE)), sizes)
    play(stage, moves, STEMS, 0.0)
    assert_exact(stage, _as_alone)
    if stage.num_copies:
        event("copied")
    if stage.life.totals.preemptions:
        event("preempted")


def _crowd(count: int) -> list[Move]:
    """Families that come every few steps, some of them preempted or cancelled."""
    moves = []
    for number in range(count):
        domain = TRACKLESS if number % 3 == 2 else OPEN
        moves.append(
            Move("submit", 10 * number, number % 3, 5 + 7 * number % 24, (16, 9, 12)[: 1 + number % 3], domain)
        )
        moves.append(Move("steps", 3 + number % 2))
        moves.append(Move(("preempt", "steps", "cancel")[number % 3], 4 * number + 1))
    return moves


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_real_checkpoint_says_what_transformers_says(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / family, family, seed=3)  # type: ignore[arg-type]
    oracle = Oracle(checkpoint)
    for sizes in (Sizes(num_blocks=16, max_chunk_tokens=5), Sizes(num_blocks=22, max_step_tokens=9)):
        executor = TorchExecutor(
            checkpoint, device="cpu", dtype="float32", num_blocks=sizes.num_blocks, block_size=BLOCK_SIZE, num_threads=1
        )
        stage = Stage(executor, sizes)
        play(stage, _crowd(9), STEMS, 0.0)
        assert_exact(stage, lambda one: oracle.check(_u32(one.request.tokens), one.tokens) if one.tokens else None)
        assert stage.num_copies > 0
        assert stage.life.totals.preemptions > 3
        assert sum(one.finish is Finish.LENGTH for one in stage.served) > 10


def test_a_copy_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvHonest, "copy_blocks", lambda self, src, dst: None)
    sizes = Sizes()
    stage = Stage(KvHonest(PoolSpec(sizes.num_blocks, BLOCK_SIZE)), sizes)
    play(stage, _crowd(9), STEMS, 0.0)
    with pytest.raises(AssertionError):
        assert_exact(stage, _as_alone)
