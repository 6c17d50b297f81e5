"""The whole executor over the Triton kernels says what it says over plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.step_driver import DrivenSequence, build_batch


def test_same_logits_as_plain_torch(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
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
