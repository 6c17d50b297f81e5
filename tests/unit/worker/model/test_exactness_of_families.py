"""The torch executor says token for token what `transformers` says, whatever the chunks, mixes and block tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import LLAMA3_ROPE, YARN_ROPE, Family, write_tiny_checkpoint
from tests.fakes.oracle import model_of
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, build_batch, run_to_length

TIE_MARGIN = 1e-4  # logits closer than this may order either way in float32
PROMPT_LENGTHS = (1, 5, 16, 33, 70, 128)
NUM_NEW = 12

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied-llama3-rope": {"family": "llama", "tie": True, "rope_scaling": LLAMA3_ROPE},
    "llama-linear-rope": {"family": "llama", "rope_scaling": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}},
    "llama-biases-wide-heads": {"family": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "qwen2": {"family": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56},
    "qwen2-tied-sharded": {"family": "qwen2", "tie": True, "sharded": True},
    "qwen2-upper-windows-yarn": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
        "rope_scaling": YARN_ROPE,
    },
    "mistral": {"family": "mistral"},
    "mistral-without-window": {"family": "mistral", "sliding_window": None, "head_dim": 24},
    "qwen3": {"family": "qwen3", "tie": True},
    "gemma2": {"family": "gemma2", "num_hidden_layers": 3},
    "gemma2-without-caps": {
        "family": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


def oracle_logits(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] of one full forward pass without any cache."""
    model = model_of(checkpoint)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_greedy(checkpoint: Path, sequence: DrivenSequence) -> None:
    """Each sampled token is the oracle's best, given the tokens before it, or within TIE_MARGIN of it."""
    logits = oracle_logits(checkpoint, sequence.tokens[:-1])
    first = len(sequence.tokens) - len(sequence.sampled)
    for index, token in enumerate(sequence.sampled):
        row = logits[first + index - 1]
        assert row.max() - row[token] <= TIE_MARGIN, f"token {index}: got {token}, the oracle says {int(row.argmax())}"


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_greedy_matches_oracle(tmp_path: Path, name: str, block_size: int) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / name, **CHECKPOINTS[name])
    rng = np.random.default_rng(7)
    executor = TorchExecutor(checkpoint, num_blocks=64, block_size=block_size)
    tables = allot_blocks([length + NUM_NEW for length in PROMPT_LENGTHS], block_size, 64, rng)
    sequences = [
        DrivenSequence([int(t) for t in rng.integers(0, 256, length)], table)
        for length, table in zip(PROMPT_LENGTHS, tables, strict=True)
    ]
    run_to_length(executor, sequences, [NUM_NEW] * len(sequences), chunk_max=40, rng=rng)
    for sequence in sequences:
        assert_greedy(checkpoint, sequence)
        assert len(set(sequence.sampled)) > 2, "a model that repeats one token proves nothing"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_matches_generate(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, family, seed=3, eos_token_id=None)
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 256, 50)]
    model = model_of(checkpoint)
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 50), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0].tolist()
    executor = TorchExecutor(checkpoint, num_blocks=8, block_size=16)
    sequence = DrivenSequence(prompt, [5, 1, 7, 0, 3])
    run_to_length(executor, [sequence], [24], chunk_max=50, rng=np.random.default_rng(0))
    assert sequence.tokens == expected


def test_long_prompt_crosses_query_slices(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    rng = np.random.default_rng(2)
    sequence = DrivenSequence([int(t) for t in rng.integers(0, 256, 900)], [int(b) for b in rng.permutation(60)])
    executor = TorchExecutor(checkpoint, num_blocks=60, block_size=16)
    executor.execute(build_batch([sequence], [300], 16))
    sequence.num_computed_tokens = 300
    logits = executor.logits(build_batch([sequence], [600], 16))
    torch.testing.assert_close(logits[0], oracle_logits(checkpoint, sequence.tokens)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(tmp_path: Path, dtype: Any) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    prompt = [int(t) for t in np.random.default_rng(4).integers(0, 256, 60)]
    exact = oracle_logits(checkpoint, prompt)[-1]
    executor = TorchExecutor(checkpoint, dtype=dtype, num_blocks=8, block_size=16)
    logits = executor.logits(build_batch([DrivenSequence(prompt, [3, 1, 6, 2])], [60], 16))[0].float()
    assert torch.nn.functional.cosine_similarity(logits, exact, dim=0) > 0.999
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()
