"""Steps as graphs, with graphs that call their work again: the same tokens as without, whatever came before, and
nothing that is no row's own is read or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from coppice.messages.step import SamplingParams, StepPlan, StepResult
from coppice_worker.core.batch import run
from coppice_worker.core.batch.guides import Guided
from coppice_worker.core.batch.step_batch import Executor, StepBatch, StepLimits
from coppice_worker.model.decoder.ranks import RankGroup
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.graphs import GRAPH_ROWS_MAX, graph_sizes
from tests.fakes.cache.recorded import RecordableBackend, Recorded
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, build_batch, run_to_length
from tests.fakes.worker.worker_plans import applied, grow, h, handles, ready_core, settings, start, u32

BLOCK_SIZE = 4
NUM_BLOCKS = 60


@pytest.mark.parametrize("rows_max", [1, 2, 3, 7, 8, 9, 31, 256, 1000, 5000])
def test_sizes_leave_little_padding(rows_max: int) -> None:
    sizes = graph_sizes(rows_max)
    largest = min(rows_max, GRAPH_ROWS_MAX)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    assert len(sizes) <= 45
    for count in range(1, largest + 1):
        size = min(size for size in sizes if size >= count)
        assert size - count < max(8, count / 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen2", eos_token_id=None)


class GraphExecutor(TorchExecutor):
    """A `TorchExecutor` whose steps are recorded, in a pool that is NaN wherever nobody wrote."""

    backend: RecordableBackend

    def __init__(
        self, checkpoint: Path, num_blocks: int = NUM_BLOCKS, rows_max: int = 12, group: RankGroup | None = None
    ) -> None:
        self.recorded = Recorded()
        super().__init__(
            checkpoint,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kernels="torch",
            limits=StepLimits(rows_max, 64),
            graphs=lambda: self.recorded,
            group=group,
        )
        self.warm_up()
        assert self._pool.storage.abs().sum() == 0, "what is recorded writes nothing"
        self._pool.storage.fill_(float("nan"))
        self.backend.padding = 0

    def _use_pool(self, num_blocks: int, block_size: int) -> None:
        super()._use_pool(num_blocks, block_size)
        self._backend = self.backend = RecordableBackend(self._pool, self._backend.heads)  # type: ignore[attr-defined]

    def written(self) -> torch.Tensor:
        """[num_blocks, block], True where a token's KV is."""
        return ~self._pool.storage.isnan().all(dim=(0, 1, 3, 5))


def plain(checkpoint: Path) -> TorchExecutor:
    return TorchExecutor(checkpoint, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernels="torch")


def some_sequences(count: int, rng: np.random.Generator, num_new: int) -> list[DrivenSequence]:
    lengths = rng.integers(1, 14, count)
    tables = allot_blocks([int(n) + num_new for n in lengths], BLOCK_SIZE, NUM_BLOCKS, rng)
    return [
        DrivenSequence([int(t) for t in rng.integers(0, 256, n)], table, seed=i)
        for i, (n, table) in enumerate(zip(lengths, tables, strict=True))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_single_launches(checkpoint: Path, seed: int) -> None:
    """Batches of all sizes, one after the other, with chunks between them and settings that no graph has."""
    results = []
    for executor in (GraphExecutor(checkpoint), plain(checkpoint)):
        rng = np.random.default_rng(seed)
        sequences = some_sequences(9, rng, num_new=8)
        for index in (2, 5):
            sequences[index] = replace(sequences[index], temperature=0.8, top_k=20, top_p=0.9)
        run_to_length(executor, sequences[:3], [6] * 3, chunk_max=3, rng=rng)
        run_to_length(executor, sequences[3:], [8] * 6, chunk_max=9, rng=rng)
        run_to_length(executor, sequences[:3], [8] * 3, chunk_max=3, rng=rng)
        results.append([sequence.sampled for sequence in sequences])
        if isinstance(executor, GraphExecutor):
            assert executor.recorded.num_replays > 10
            assert executor.backend.padding > 10
            used = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
            for sequence in sequences:
                for position in range(sequence.num_computed_tokens):
                    used[sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
            assert torch.equal(executor.written(), used)
    assert results[0] == results[1]


def prefill(sequences: list[DrivenSequence], *executors: TorchExecutor) -> None:
    """Computes all tokens of each sequence, and gives it one more."""
    prompts = [len(sequence.tokens) for sequence in sequences]
    for executor in executors:
        executor.execute(build_batch(sequences, prompts, BLOCK_SIZE))
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.tokens)
        sequence.tokens.append(11)


def test_what_an_earlier_batch_left_does_not_matter(checkpoint: Path) -> None:
    rng = np.random.default_rng(7)
    sequences = some_sequences(7, rng, num_new=3)
    executor, other = GraphExecutor(checkpoint), plain(checkpoint)
    prefill(sequences, executor, other)
    many = build_batch(sequences, [1] * 7, BLOCK_SIZE)
    few = build_batch(sequences[4:6], [1] * 2, BLOCK_SIZE)
    expected = {7: other.execute(many).tokens.tolist(), 2: other.execute(few).tokens.tolist()}
    for batch in (many, few, many, few):
        assert executor.execute(batch).tokens.tolist() == expected[len(batch.token_ids)]


def test_rows_that_begin_with_the_same_blocks_take_the_launches_for_that(checkpoint: Path) -> None:
    executor, other = GraphExecutor(checkpoint), plain(checkpoint)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    together = [DrivenSequence([*prompt, n], [7, 8, 20 + n], num_computed_tokens=10) for n in range(3)]
    alone = DrivenSequence([*prompt, 9], [30, 31, 32], num_computed_tokens=10)
    for computing in (executor, other):
        for table in ([7, 8, 20], [30, 31, 32]):
            computing.execute(build_batch([DrivenSequence(prompt, table)], [10], BLOCK_SIZE))
        computing.copy_blocks(np.array([20, 20], np.int32), np.array([21, 22], np.int32))
    for rows, shared in ((together, 2), ([alone, *together], 0), (together, 2), ([alone], 0)):
        batch = build_batch(rows, [1] * len(rows), BLOCK_SIZE)
        before = executor.backend.num_shared
        assert executor.execute(batch).tokens.tolist() == other.execute(batch).tokens.tolist()
        assert executor.backend.num_shared - before == shared, "one for each layer"
    for changed in (None, np.array([], np.int32)):
        batch = replace(build_batch(together, [1] * 3, BLOCK_SIZE), changed_tables=changed)
        executor.execute(batch)
    assert executor.backend.num_shared == 2 * 4, "what rows had in common they still have"


def test_a_step_of_more_rows_than_graphs_have_needs_none(checkpoint: Path) -> None:
    executor, other = GraphExecutor(checkpoint, rows_max=2), plain(checkpoint)
    sequences = some_sequences(3, np.random.default_rng(3), num_new=1)
    batch = build_batch([replace(s, tokens=s.tokens[:1]) for s in sequences], [1] * 3, BLOCK_SIZE)
    before = executor.recorded.num_replays
    assert executor.execute(batch).tokens.tolist() == other.execute(batch).tokens.tolist()
    assert executor.recorded.num_replays == before
    assert not executor.runs_ahead(batch)


# -- mixed steps


def mixed(rows: list[tuple[int, int]], rng: np.random.Generator) -> list[DrivenSequence]:
    """Sequences by tokens that were computed and new ones."""
    tables = allot_blocks([before + new for before, new in rows], BLOCK_SIZE, NUM_BLOCKS, rng)
    return [
        DrivenSequence([int(t) for t in rng.integers(0, 256, before + new)], table, num_computed_tokens=before)
        for (before, new), table in zip(rows, tables, strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([(0, 5)], 16),
        ([(7, 16)], 16),
        ([(6, 17)], 32),
        ([(3, 1), (9, 12), (12, 1)], 16),
        ([(9, 1)] * 5 + [(0, 21), (4, 2), (1, 2)], 32),
        ([(3, 62), (5, 2)], 64),
        ([(0, 3)] * 3 + [(8, 2)], None),  # a chunk more than there is room for
        ([(0, 63), (4, 2)], None),  # a token more
    ],
)
def test_a_mixed_step_takes_the_least_graph_with_room(
    checkpoint: Path, rows: list[tuple[int, int]], size: int | None
) -> None:
    executor, other = GraphExecutor(checkpoint), plain(checkpoint)
    sequences = mixed(rows, np.random.default_rng(len(rows)))
    for computing in (executor, other):
        for sequence in sequences:
            if sequence.num_computed_tokens:
                before = replace(sequence, num_computed_tokens=0)
                computing.execute(build_batch([before], [sequence.num_computed_tokens], BLOCK_SIZE))
    executor.backend.sizes.clear()
    batch = build_batch(sequences, [new for _, new in rows], BLOCK_SIZE)
    replays = executor.recorded.num_replays
    assert executor.execute(batch).tokens.tolist() == other.execute(batch).tokens.tolist()
    assert executor.backend.sizes == ([] if size is None else [size])
    assert executor.recorded.num_replays - replays == (0 if size is None else 2), "body and tail"
    assert int(executor.written().sum()) == sum(before + new for before, new in rows)
    assert not executor.runs_ahead(batch)


def test_decodes_behind_a_mixed_step_look_again_for_what_they_have_in_common(checkpoint: Path) -> None:
    """Also where the core says that no table has changed: the chunk of one step decodes in the next."""
    executor, other = GraphExecutor(checkpoint), plain(checkpoint)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    for computing in (executor, other):
        computing.execute(build_batch([DrivenSequence(prompt, [7, 8])], [8], BLOCK_SIZE))
    rows = [
        DrivenSequence([*prompt, 10], [7, 8, 20], num_computed_tokens=8),
        DrivenSequence([*prompt, 11, 12], [7, 8, 21], num_computed_tokens=8),
    ]
    first = build_batch(rows, [1, 2], BLOCK_SIZE)
    assert executor.execute(first).tokens.tolist() == other.execute(first).tokens.tolist()
    assert executor.backend.num_shared == 0
    for row, new in zip(rows, (1, 2), strict=True):
        row.num_computed_tokens += new
        row.tokens.append(5)
    second = replace(build_batch(rows, [1, 1], BLOCK_SIZE), changed_tables=np.array([], np.int32))
    assert executor.execute(second).tokens.tolist() == other.execute(second).tokens.tolist()
    assert executor.backend.num_shared == 2, "once for each layer"


class EvenTokens:
    """A `Guide`."""

    is_ready = True

    def fill(self, output: np.ndarray, words: np.ndarray) -> bool:
        words[:] = 0x55555555
        return True


def test_a_step_with_a_guided_row_is_not_launched_ahead_and_gives_the_tokens_of_single_launches(
    checkpoint: Path,
) -> None:
    executor, other = GraphExecutor(checkpoint), plain(checkpoint)
    sequences = some_sequences(4, np.random.default_rng(5), num_new=2)
    prefill(sequences, executor, other)
    free = build_batch(sequences, [1] * 4, BLOCK_SIZE)
    guided = Guided(np.array([1, 3], np.int32), (EvenTokens(), EvenTokens()), (np.zeros(0, np.uint32),) * 2)
    batch = replace(free, sample=replace(free.sample, guided=guided))
    assert executor.runs_ahead(free)
    assert not executor.runs_ahead(batch)
    unguided = other.execute(free).tokens
    tokens = executor.execute(batch).tokens
    assert tokens.tolist() == other.execute(batch).tokens.tolist()
    assert tokens[[0, 2]].tolist() == unguided[[0, 2]].tolist()
    assert not (tokens[[1, 3]] % 2).any()
    assert (unguided % 2).any(), "else nothing is shown"


# -- through the core


class Planned:
    """A core and an executor; sequence n has blocks 8 n and those after it."""

    def __init__(self, executor: Executor) -> None:
        self.core = ready_core(settings(num_blocks=NUM_BLOCKS, max_step_tokens=64))
        self.executor = executor
        self._step = 0

    def plan(self, **fields: object) -> StepResult:
        self._step += 1
        step, output = run.run(self.core, self.executor, applied(self.core, StepPlan(self._step, **fields)))  # type: ignore[arg-type]
        result = self.core.complete(step, output)
        assert not result.refusals
        self.core.check()
        return result

    def generate(self, sampling: SamplingParams, last: SamplingParams) -> list[tuple[bytes, object]]:
        """Three sequences, of which the last samples in its own way: chunks, single steps, bursts, growing tables."""
        starts = [
            msgspec.structs.replace(
                start(n, count, handles(*[h(8 * n + block) for block in range(4)])), sampling=wanted
            )
            for n, count, wanted in ((1, 5, sampling), (2, 3, sampling), (3, 8, last))
        ]
        rows = u32(1, 2, 3)
        results = [self.plan(attach=tuple(starts), rows=rows, row_tokens=u32(5, 3, 8))]
        results += [self.plan(repeat_rows=True), self.plan(repeat_rows=True, num_decode_steps=4)]
        results += [self.plan(repeat_rows=True, grow=(grow(3, h(28), h(29)), grow(1, h(12), h(13))))]
        results += [self.plan(repeat_rows=True, num_decode_steps=5), self.plan(rows=u32(2), row_tokens=u32(1))]
        results += [self.plan(detach=u32(2), rows=u32(3, 1), row_tokens=u32(1, 1))]
        results += [self.plan(repeat_rows=True, num_decode_steps=3), self.plan(repeat_rows=True)]
        return [(result.sampled_tokens, result.logprobs) for result in results]


GREEDY = SamplingParams(temperature=0.0)
OTHERS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.9, seed=5, top_p=0.8, top_k=40),
    "penalised": SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3),
    "reported": SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=2),
}


class Watched(GraphExecutor):
    """Counts what is launched while another step is pending."""

    def __init__(self, checkpoint: Path, group: RankGroup | None = None) -> None:
        super().__init__(checkpoint, group=group)
        self.num_followed = 0

    def launch(self, batch: StepBatch):  # type: ignore[no-untyped-def]
        self.num_followed += batch.follows
        if batch.follows:
            # What the host says of a token that it cannot know yet must not matter.
            batch = replace(batch, token_ids=np.full_like(batch.token_ids, 300))
        return super().launch(batch)


@pytest.mark.parametrize("other", OTHERS)
def test_plans_are_computed_as_without_graphs(checkpoint: Path, other: str) -> None:
    executor = Watched(checkpoint)
    found = Planned(executor).generate(GREEDY, OTHERS[other])
    wanted = Planned(plain(checkpoint)).generate(GREEDY, OTHERS[other])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
        assert [entry.top_ids for entry in mine] == [entry.top_ids for entry in theirs]  # type: ignore[attr-defined]
        for one, two in zip(mine, theirs, strict=True):  # type: ignore[call-overload]
            a, b = np.frombuffer(one.chosen, "<f4"), np.frombuffer(two.chosen, "<f4")
            np.testing.assert_allclose(a, b, atol=1e-4)
    assert executor.recorded.num_replays > 10
    assert executor.num_followed == (3 + 4 + 2 if other in ("greedy", "drawn") else 0)


# -- what they need


class FallingMemory:
    """A `DeviceMemory` of which each launch that is recorded takes ten bytes."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def total_and_free(self) -> tuple[int, int]:
        return 10_000, 10_000 - 10 * self._recorded.num_captured


def test_memory_of_all_graphs_is_counted(checkpoint: Path) -> None:
    executor = GraphExecutor(checkpoint, rows_max=3)
    found = executor._graphs_bytes(FallingMemory(executor.recorded))  # type: ignore[arg-type]
    bodies, tail = 2 * 10, 10
    num_mixed, num_decodes = 3, 3  # 16, 32, 64 tokens; 1, 2, 3 rows
    assert found == num_mixed * bodies + num_decodes * (bodies + tail)


def test_many_short_chunks_take_a_larger_graph(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with room for their tiles, where that for their tokens has none."""
    executor = GraphExecutor(checkpoint)
    chunks = executor.backend.chunks
    monkeypatch.setattr(executor.backend, "chunks", lambda batch, size: chunks(batch, size) if size > 16 else None)
    executor.backend.sizes.clear()
    executor.execute(build_batch(mixed([(0, 3), (0, 4)], np.random.default_rng(1)), [3, 4], BLOCK_SIZE))
    assert executor.backend.sizes == [32]
