"""The one-process engine: its tokens are those of the prompt and the seed alone, and it survives what goes wrong."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice_offline.interface.errors import EngineBroken, RequestFailed
from coppice_sim.hosts.kv_honest import KvHonest, reference
from coppice_worker.core.batch.step_batch import PoolSpec, StepBatch, StepOutput
from tests.fakes.tools.offline import BLOCK_SIZE, HonestEngine, Silent

SALT = 0


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[bytes, int, int]]:
    """Prompts that often begin alike, seeds, and lengths of output."""
    stem = draw(st.lists(st.integers(0, 999), min_size=1, max_size=30))
    asked = []
    for _ in range(draw(st.integers(1, 10))):
        kept = draw(st.integers(0, len(stem)))
        rest = draw(st.lists(st.integers(0, 999), min_size=1, max_size=12))
        asked.append((packed(stem[:kept] + rest), draw(st.integers(0, 2**64 - 1)), draw(st.integers(1, 12))))
    return asked


@settings(deadline=None, max_examples=25)
@given(
    calls=st.lists(prompts(), min_size=1, max_size=3),
    num_blocks=st.integers(16, 48),
    max_running=st.integers(1, 8),
    max_step_tokens=st.integers(8, 64),
    depth=st.integers(1, 2),
    window=st.integers(1, 12),
)
def test_tokens_do_not_depend_on_what_else_is_served(
    calls: list[list[tuple[bytes, int, int]]],
    num_blocks: int,
    max_running: int,
    max_step_tokens: int,
    depth: int,
    window: int,
) -> None:
    honest = HonestEngine(
        num_blocks=num_blocks,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_steps_in_flight=depth,
        window=window,
    )
    for asked in calls:
        expected = [reference(prompt, count, seed=seed, salt=SALT) for prompt, seed, count in asked]
        assert honest.generate(asked) == expected
        honest.engine.check()
        assert honest.engine.is_idle
        assert honest.engine.stats().leases == 0


def test_a_prefix_of_an_earlier_call_is_found_again() -> None:
    honest = HonestEngine()
    prompt = packed(list(range(20)))
    honest.generate([(prompt, 1, 3)])
    again = honest.stream(prompt, 2, 3)
    honest.runner.run([again], Silent())
    # The last token is always computed: of five blocks four are shared, and of the fifth all but one token is copied.
    assert again.completion().usage.cached_tokens == len(prompt) // 4 - 1


class _Counting(KvHonest):
    """Remembers how many rows each step had."""

    def __init__(self) -> None:
        super().__init__(PoolSpec(64, BLOCK_SIZE))
        self.rows: list[int] = []

    def execute(self, batch: StepBatch) -> StepOutput:
        self.rows.append(len(batch.context_lens))
        return super().execute(batch)


def test_what_is_submitted_after_a_step_takes_part_in_the_next() -> None:
    counting = _Counting()
    honest = HonestEngine(executor=counting)
    engine = honest.engine
    engine.submit(honest.stream(packed([1, 2, 3]), 1, 40).request)
    while len(counting.rows) < 3:
        engine.advance()
        engine.step()
    alone = len(counting.rows)
    engine.submit(honest.stream(packed([4, 5, 6]), 1, 40).request)
    engine.advance()
    engine.step()
    assert counting.rows[:alone] == [1] * alone
    assert counting.rows[alone:] == [2]


@pytest.mark.parametrize("look_ns", [1_000_000, 80_000_000])
def test_neither_a_long_call_nor_a_pause_between_calls_ends_a_session(look_ns: int) -> None:
    now_ns = [1]

    def clock() -> int:
        now_ns[0] += look_ns
        return now_ns[0]

    honest = HonestEngine(now_ns=clock)
    prompt = packed(list(range(20)))
    for seed in range(3):
        again = honest.stream(prompt, seed, 60)
        honest.runner.run([again], Silent())
        assert again.completion().token_ids == reference(prompt, 60, seed=seed, salt=SALT)
        assert again.completion().usage.cached_tokens == (len(prompt) // 4 - 1 if seed else 0)
        now_ns[0] += 3_600_000_000_000


class _Executor(KvHonest):
    """Does something else once, in its third step."""

    def __init__(self) -> None:
        super().__init__(PoolSpec(64, BLOCK_SIZE))
        self.num_steps = 0

    def execute(self, batch: StepBatch) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 3:
            self.third()
        return super().execute(batch)

    def third(self) -> None:
        raise NotImplementedError


class _Interrupting(_Executor):
    def third(self) -> None:
        signal.raise_signal(signal.SIGINT)


class _Failing(_Executor):
    def third(self) -> None:
        raise MemoryError("no memory for the step")


def test_ctrl_c_ends_what_is_at_work_and_leaves_the_engine_usable() -> None:
    executor = _Interrupting()
    honest = HonestEngine(executor=executor)
    asked = [(packed([number] * 9), number, 20) for number in range(12)]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        honest.generate(asked)
    assert signal.getsignal(signal.SIGINT) is before
    assert executor.num_steps == 3, "nothing is computed for requests that were cancelled"
    assert honest.engine.is_idle
    honest.engine.check()
    assert honest.engine.stats().leases == 0
    assert honest.generate(asked) == [reference(p, count, seed=seed, salt=SALT) for p, seed, count in asked]


def test_a_second_ctrl_c_acts_at_once_and_is_remembered() -> None:
    executor = _Interrupting()
    executor.third = lambda: (signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGINT))  # type: ignore[method-assign, assignment, return-value]
    honest = HonestEngine(executor=executor)
    with pytest.raises(KeyboardInterrupt):
        honest.generate([(packed([1, 2, 3]), 1, 20)])
    with pytest.raises(EngineBroken, match="cut off"):
        honest.generate([(packed([1, 2, 3]), 1, 20)])


def test_a_step_that_fails_breaks_the_engine_with_a_word() -> None:
    honest = HonestEngine(executor=_Failing())
    with pytest.raises(EngineBroken, match="no memory for the step") as failed:
        honest.generate([(packed([1, 2, 3]), 1, 20)])
    assert "new LLM" in failed.value.line()
    with pytest.raises(EngineBroken, match="no memory for the step"):
        honest.generate([(packed([1, 2, 3]), 1, 2)])


def test_one_request_that_cannot_end_ends_the_call_and_not_the_engine() -> None:
    honest = HonestEngine(num_blocks=8)
    # 31 tokens fit into 8 blocks of 4, the 30 that are wanted after them do not.
    with pytest.raises(RequestFailed, match="block"):
        honest.generate([(packed([5] * 9), 1, 4), (packed(list(range(31))), 2, 30), (packed([6] * 9), 3, 20)])
    assert honest.engine.is_idle
    honest.engine.check()
    prompt = packed([5] * 9)
    assert honest.generate([(prompt, 1, 4)]) == [reference(prompt, 4, seed=1, salt=SALT)]


def followed(honest: HonestEngine, prompt: bytes, count: int) -> list[int]:
    stream = honest.stream(prompt, 1, count)
    for _ in honest.runner.follow([stream]):
        pass
    return stream.completion().token_ids


def test_ctrl_c_ends_what_is_followed_and_leaves_the_engine_usable() -> None:
    executor = _Interrupting()
    honest = HonestEngine(executor=executor)
    prompt = packed([1, 2, 3])
    before = signal.getsignal(signal.SIGINT)
    turns = honest.runner.follow([honest.stream(packed([number] * 9), number, 20) for number in range(12)])
    next(turns)
    assert signal.getsignal(signal.SIGINT) is before, "between two steps Ctrl-C is the caller's"
    with pytest.raises(KeyboardInterrupt):
        list(turns)
    assert executor.num_steps == 3
    assert honest.engine.is_idle
    honest.engine.check()
    assert honest.engine.stats().leases == 0
    assert followed(honest, prompt, 20) == reference(prompt, 20, seed=1, salt=SALT)


def test_a_step_that_fails_ends_what_is_followed_with_a_word() -> None:
    honest = HonestEngine(executor=_Failing())
    with pytest.raises(EngineBroken, match="no memory for the step"):
        followed(honest, packed([1, 2, 3]), 20)
    with pytest.raises(EngineBroken, match="no memory for the step"):
        followed(honest, packed([1, 2, 3]), 2)


def test_what_is_followed_and_cannot_end_says_why() -> None:
    honest = HonestEngine(num_blocks=8)
    with pytest.raises(RequestFailed, match="block"):
        followed(honest, packed(list(range(31))), 30)
    assert honest.engine.is_idle
    honest.engine.check()


def test_closing_what_is_followed_gives_its_blocks_back() -> None:
    honest = HonestEngine()
    turns = honest.runner.follow([honest.stream(packed([number] * 9), number, 40) for number in range(6)])
    for _ in range(4):
        next(turns)
    assert honest.engine.stats().leases > 0
    turns.close()
    assert honest.engine.is_idle
    assert honest.engine.stats().leases == 0
    honest.engine.check()
