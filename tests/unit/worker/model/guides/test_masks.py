"""Rows that may not take every token: they take what is allowed, and nobody beside them notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.guides import Guide, Guided, Masks, UInt32, fill_masks
from coppice_worker.core.batch.step_batch import LogitChanges, StepBatch, StepOutput
from coppice_worker.model.decoder.logits import mask_logits
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch
from tests.fakes.waiting import WAIT_S

VOCAB = 301  # no multiple of 32
BLOCK_SIZE = 16
NO_OUTPUT_YET = np.zeros(0, np.uint32)
ALLOWED = ((7, 40, 299, 300), (5,), tuple(range(0, VOCAB, 3)))  # of the guided rows below
GUIDED_ROWS = (0, 3, 4)


class Allowing:
    """These tokens, whatever came before."""

    is_ready = True

    def __init__(self, tokens: Iterable[int], is_broken: bool = False) -> None:
        self.tokens, self.is_broken = list(tokens), is_broken

    def fill(self, output: UInt32, words: UInt32) -> bool:
        bits = np.zeros(32 * len(words), np.uint8)
        bits[self.tokens] = 1
        words[:] = np.packbits(bits, bitorder="little").view("<u4")
        return not self.is_broken


def guided(rows: Sequence[int], guides: Sequence[Guide]) -> Guided:
    return Guided(np.array(rows, np.int32), tuple(guides), (NO_OUTPUT_YET,) * len(guides))


# --- logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 301, 4096])
def test_only_guided_rows_and_only_their_forbidden_tokens_change(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    before = logits.clone()
    allowed = [[vocab - 1], list(range(0, vocab, 2)), []]
    mask_logits(logits, fill_masks(guided([1, 2, 5], [Allowing(tokens) for tokens in allowed]), vocab))
    kept = torch.ones(6, vocab, dtype=torch.bool)
    for row, tokens in zip([1, 2, 5], allowed, strict=True):
        kept[row] = False
        kept[row, tokens] = True
    assert torch.equal(logits[kept], before[kept])
    assert (logits[~kept] == float("-inf")).all()
    assert logits.dtype is dtype


def test_masks_of_nobody_change_nothing() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    empty = np.zeros(0, np.int32)
    mask_logits(logits, Masks(empty, np.zeros((0, VOCAB), np.bool_), np.zeros(0, np.bool_)))
    mask_logits(logits, fill_masks(guided([0, 1], [Allowing([3], is_broken=True)] * 2), VOCAB))
    assert torch.equal(logits, before)


# --- steps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("masks"), vocab_size=VOCAB)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def executor(checkpoint: Path, request: pytest.FixtureRequest) -> TorchExecutor:
    return TorchExecutor(checkpoint, num_blocks=16, block_size=BLOCK_SIZE, dtype=request.param)


def six_rows() -> StepBatch:
    """Greedy and sampled ones in turns. The fifth sequence, in the middle of its prompt, is none of them."""
    rng = np.random.default_rng(3)
    lengths = [5, 17, 3, 9, 20, 12, 8]
    sequences = [
        DrivenSequence(
            rng.integers(0, 256, length).tolist(),
            [2 * index, 2 * index + 1],
            temperature=1.5 * (index % 2),
            top_k=20 * (index == 3),
            top_p=1.0 if index < 5 else 0.9,
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]
    batch = build_batch(sequences, [11 if index == 4 else length for index, length in enumerate(lengths)], BLOCK_SIZE)
    assert batch.sample.rows.tolist() == [0, 1, 2, 3, 5, 6]
    return batch


def with_fields(batch: StepBatch, **fields: object) -> StepBatch:
    return replace(batch, sample=replace(batch.sample, **fields))  # type: ignore[arg-type]


def with_changes(batch: StepBatch) -> StepBatch:
    """The second row, which nobody guides, and the fourth, which somebody does, want a token more than any other."""
    nobody, ones = np.zeros(0, np.int64), np.ones(6, np.float32)
    rows, ids = np.array([1, 3], np.int64), np.array([9, 12], np.int64)
    bias = np.full(2, 1000, np.float32)
    return with_fields(
        batch,
        changes=LogitChanges(ones, 0 * ones, 0 * ones, nobody, nobody, nobody.astype(bool), rows, ids, bias),
    )


def with_logprobs(batch: StepBatch) -> StepBatch:
    return with_fields(batch, num_logprobs=np.array([2, 0, 3, 4, -1, 1], np.int32))


def as_it_is(batch: StepBatch) -> StepBatch:
    return batch


def with_guides(batch: StepBatch) -> StepBatch:
    return with_fields(batch, guided=guided(GUIDED_ROWS, [Allowing(tokens) for tokens in ALLOWED]))


@pytest.mark.parametrize("want", [as_it_is, with_logprobs, with_changes])
def test_unguided_rows_get_the_tokens_that_they_get_without_guided_mates(
    executor: TorchExecutor, want: Callable[[StepBatch], StepBatch]
) -> None:
    batch = want(six_rows())
    alone, beside = executor.execute(batch), executor.execute(with_guides(batch))
    free = [row for row in range(6) if row not in GUIDED_ROWS]
    assert beside.tokens[free].tolist() == alone.tokens[free].tolist()
    may = [set(tokens) for tokens in ALLOWED]
    assert all(beside.tokens[row] in tokens for row, tokens in zip(GUIDED_ROWS, may, strict=True))
    assert not all(alone.tokens[row] in tokens for row, tokens in zip(GUIDED_ROWS, may, strict=True))
    assert beside.broken is None
    assert beside.tokens.dtype == np.int32


def test_a_guided_row_takes_the_best_of_what_it_may(executor: TorchExecutor) -> None:
    batch = six_rows()
    logits = executor.logits(batch)
    batch = with_fields(batch, top_k=np.array([0, 0, 0, 1, 1, 0], np.int32))
    tokens = executor.execute(with_guides(batch)).tokens
    for row, allowed in zip(GUIDED_ROWS, ALLOWED, strict=True):
        assert tokens[row] == max(allowed, key=lambda token: float(logits[row, token]))


def test_a_bias_decides_among_what_is_allowed_and_allows_nothing(executor: TorchExecutor) -> None:
    batch = with_changes(six_rows())
    assert executor.execute(batch).tokens[3] == 12
    allowing_both = with_fields(batch, guided=guided([3], [Allowing([12, 30])]))
    assert executor.execute(allowing_both).tokens[3] == 12
    forbidding = with_fields(batch, guided=guided([3], [Allowing([30])]))
    assert executor.execute(forbidding).tokens[3] == 30


def test_log_probabilities_are_those_of_the_model(executor: TorchExecutor) -> None:
    batch = with_logprobs(six_rows())
    alone, beside = executor.execute(batch), executor.execute(with_guides(batch))
    assert alone.logprobs is not None
    assert beside.logprobs is not None
    assert (beside.logprobs.top_ids == alone.logprobs.top_ids).all()
    assert (beside.logprobs.top == alone.logprobs.top).all()
    logits = executor.logits(batch).float()
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(6), torch.from_numpy(beside.tokens).long()]
    reported = [0, 1, 2, 3, 5]
    np.testing.assert_allclose(beside.logprobs.chosen, expected[reported].numpy(), rtol=1e-5, atol=1e-5)
    assert beside.logprobs.chosen[1] == alone.logprobs.chosen[1]


def test_broken_rows_are_named_among_those_that_sample(executor: TorchExecutor) -> None:
    batch = six_rows()
    alone = executor.execute(batch).tokens
    guides = [Allowing([7]), Allowing([5], is_broken=True), Allowing([8], is_broken=True)]
    output = executor.execute(with_fields(batch, guided=guided([1, 3, 5], guides)))
    assert output.broken is not None
    assert output.broken.tolist() == [3, 5]
    assert output.tokens[1] == 7
    assert np.isfinite(output.tokens).all()
    free = [0, 2, 4]
    assert output.tokens[free].tolist() == alone[free].tolist()


def test_ranks_that_follow_compute_the_step_without_guides(executor: TorchExecutor) -> None:
    batch = six_rows()
    output: StepOutput = executor.execute(with_fields(batch, guided=Guided(np.array(GUIDED_ROWS, np.int32))))
    assert output.tokens.tolist() == executor.execute(batch).tokens.tolist()
    assert output.broken is None


def test_masks_are_filled_beside_the_hidden_states(executor: TorchExecutor) -> None:
    """Each waits until the other has begun."""
    meeting = threading.Barrier(2)

    class Meeting(Allowing):
        def fill(self, output: UInt32, words: UInt32) -> bool:
            meeting.wait(WAIT_S)
            return super().fill(output, words)

    batch = with_fields(six_rows(), guided=guided([2], [Meeting([6])]))
    forward = partial(executor.forward, batch)

    def hidden() -> torch.Tensor:
        meeting.wait(WAIT_S)
        return forward()

    with torch.inference_mode():
        assert executor._outputs.of(batch, hidden).tokens[2] == 6


def test_what_a_guide_raises_ends_the_step(executor: TorchExecutor) -> None:
    class Failing(Allowing):
        def fill(self, output: UInt32, words: UInt32) -> bool:
            raise KeyError("a fault of ours")

    with pytest.raises(KeyError, match="a fault of ours"):
        executor.execute(with_fields(six_rows(), guided=guided([2], [Failing([6])])))
    assert executor.execute(with_guides(six_rows())).tokens[3] == 5
