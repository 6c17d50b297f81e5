"""The whole executor over the Triton kernels says what it says over plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.cache.recorded import Recorded
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch


def test_same_logits_as_plain_torch(tmp_path: Path) -> None:
    """Layers with a window and without, soft caps, norms of what a layer brings."""
    checkpoint = write_tiny_checkpoint(tmp_path, "gemma2")
    triton = TorchExecutor(checkpoint, num_blocks=12, block_size=16, kernels="triton")
    plain = TorchExecutor(checkpoint, num_blocks=12, block_size=16, kernels="torch")
    rng = np.random.default_rng(3)
    prompts = [[int(t) for t in rng.integers(0, 256, length)] for length in (40, 17, 1)]
    sequences = [
        DrivenSequence(prompt, table) for prompt, table in zip(prompts, ([4, 0, 9], [7, 2], [11]), strict=True)
    ]
    for chunks in ([25, 17, 1], [15, 1, 1]):
        batch = build_batch(sequences, chunks, 16)
        torch.testing.assert_close(triton.logits(batch), plain.logits(batch), atol=2e-5, rtol=1e-5)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.num_computed_tokens += chunk
            if sequence.num_computed_tokens == len(sequence.tokens):
                sequence.tokens.append(5)


def test_recorded_steps_are_those_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches of chunks and decodes, some with rows that begin alike; where nobody wrote, the pool is NaN."""
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PREFIX_TOKENS_MIN", 64)
    monkeypatch.setattr("coppice_worker.kernels.triton.launch.PREFIX_SAVED_MIN", 64)
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    recorded = Recorded(tries=False)
    triton = TorchExecutor(
        checkpoint, num_blocks=12, kernels="triton", limits=StepLimits(4, 80), graphs=lambda: recorded
    )
    plain = TorchExecutor(checkpoint, num_blocks=12, kernels="torch")
    triton.record_graphs()
    triton._pool.storage.fill_(float("nan"))
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 256, 65)]
    first = DrivenSequence(prompt, [4, 0, 9, 3, 5])
    second = DrivenSequence([*prompt[:64], 7], [4, 0, 9, 3, 6], num_computed_tokens=64)
    other = DrivenSequence([12], [7])
    longer = DrivenSequence([int(t) for t in np.random.default_rng(6).integers(0, 256, 80)], [8, 10, 11, 1, 2])
    for chosen, chunks in (
        ([first], [64]),
        ([other, first, second], [1] * 3),
        ([second], [1]),
        ([longer, first, second], [65, 1, 1]),
        ([longer, first, second], [15, 1, 1]),
        ([first, second], [1] * 2),
    ):
        batch = build_batch(chosen, chunks, 16)
        tokens = plain.execute(batch).tokens.tolist()
        assert triton.execute(batch).tokens.tolist() == tokens
        for sequence, chunk in zip(chosen, chunks, strict=True):
            sequence.num_computed_tokens += chunk
        for row, token in zip(batch.sample.rows, tokens, strict=True):
            chosen[row].tokens.append(token)
    assert recorded.num_replays == 1 + 2 * 4, "what is sampled has a tail, and no graph has room for 65 tokens"
    assert triton._graphs is not None
    assert triton._graphs._common is not None, "the first rows of both were read together"
    written = ~triton._pool.storage.isnan().all(dim=(0, 1, 3, 5))
    assert int(written.sum()) == 64 + 2 + 3 + 1 + 80 + 4
