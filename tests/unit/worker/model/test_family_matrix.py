"""Every family, with head shapes that are in use, against `transformers`: float32 token for token, bfloat16 closely.

The whole matrix takes minutes and is marked `long`; one of each runs always.
"""

from __future__ import annotations

import builtins
import inspect
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import coppice
from coppice_worker.kernels.choice import KernelChoice
from coppice_worker.model.config.dtypes import DtypeName
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import Family, write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, build_batch, run_to_length

TIE_MARGIN = 1e-4  # logits closer than this may order either way in float32
FAMILIES: tuple[Family, ...] = get_args(Family)
HEADS = [(14, 2, 64), (28, 4, 128), (32, 8, 80), (8, 8, 96), (6, 1, 256)]  # heads, KV heads, head size
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 200, 300, 431, 600)
NUM_NEW = 10

pytestmark = pytest.mark.usefixtures("one_thread")


def write(folder: Path, family: Family, heads: tuple[int, int, int], **settings: Any) -> Path:
    num_heads, num_kv_heads, head_dim = heads
    shape: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": 16 * num_heads,
        "num_hidden_layers": 3 if family == "gemma2" else 2,
        "initializer_range": 0.1,
    }
    if family in ("qwen2", "qwen3"):
        shape |= {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
    return write_tiny_checkpoint(folder / family, family, seed=5, **{**shape, **settings})


class Reference:
    """Logits of `transformers` in float32 for whole sequences, without a cache."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab]"""
        logits: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float()


@torch.inference_mode()
def logits_of(executor: TorchExecutor, tokens: list[int], chunk: int, rng: np.random.Generator) -> torch.Tensor:
    """[len(tokens), vocab], computed chunk by chunk on random blocks."""
    num_blocks, block_size = executor.pool.num_blocks, executor.pool.block_size
    sequence = DrivenSequence(tokens, allot_blocks([len(tokens)], block_size, num_blocks, rng)[0])
    parts = []
    for start in range(0, len(tokens), chunk):
        sequence.num_computed_tokens = start
        batch = build_batch([sequence], [min(chunk, len(tokens) - start)], block_size)
        parts.append(executor._decoder.logits(executor.forward(batch)).float())
    return torch.cat(parts)


def check_greedy(reference: Reference, executor: TorchExecutor, chunk_max: int, seed: int) -> None:
    """Sixteen sequences of all lengths in mixed steps, each token the reference's best or as good."""
    rng = np.random.default_rng(seed)
    tables = allot_blocks([n + NUM_NEW for n in LENGTHS], executor.pool.block_size, executor.pool.num_blocks, rng)
    prompts = [rng.integers(0, 256, length).tolist() for length in LENGTHS]
    sequences = [DrivenSequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    run_to_length(executor, sequences, [NUM_NEW] * len(sequences), chunk_max=chunk_max, rng=rng)
    for length, sequence in zip(LENGTHS, sequences, strict=True):
        logits = reference.logits(sequence.tokens[:-1])[length - 1 :]
        for index, (row, token) in enumerate(zip(logits, sequence.sampled, strict=True)):
            assert row.max() - row[token] <= TIE_MARGIN, f"prompt of {length}, token {index}: {token}"
    assert len({token for sequence in sequences for token in sequence.sampled}) > 10, "nothing is shown by one token"


def check_logits(reference: Reference, executor: TorchExecutor, length: int, chunk: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, length).tolist()
    wanted, found = reference.logits(tokens), logits_of(executor, tokens, chunk, rng)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def open_executor(checkpoint: Path, block_size: int, kernels: KernelChoice, dtype: DtypeName) -> TorchExecutor:
    num_blocks = sum(-(-(length + NUM_NEW) // block_size) for length in LENGTHS) + 5
    return TorchExecutor(checkpoint, num_blocks=num_blocks, block_size=block_size, kernels=kernels, dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_exact(tmp_path: Path, family: Family, heads: tuple[int, int, int]) -> None:
    checkpoint = write(tmp_path, family, heads)
    reference = Reference(checkpoint)
    kernels: KernelChoice
    for kernels in ("torch", "auto"):
        for block_size in (16, 64):
            executor = open_executor(checkpoint, block_size, kernels, "float32")
            for seed, chunk_max in enumerate((1, 7, 64, 512)):
                if chunk_max > 1:  # token by token a prompt of 600 is a matter of its own
                    check_greedy(reference, executor, chunk_max, seed)
                check_logits(reference, executor, 130 if chunk_max == 1 else 600, chunk_max, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_of_each_is_exact(tmp_path: Path, family: Family) -> None:
    heads = HEADS[FAMILIES.index(family)]
    checkpoint = write(tmp_path, family, heads, num_hidden_layers=2, vocab_size=261)
    reference = Reference(checkpoint)
    executor = open_executor(checkpoint, 16, "auto", "float32")
    check_logits(reference, executor, 300, 64, seed=1)
    check_logits(reference, executor, 40, 1, seed=2)


def agreement(exact: torch.Tensor, narrow: torch.Tensor) -> tuple[float, float]:
    """Share of positions whose best token is the exact one or as likely but for 1 %, and the mean KL divergence from
    the exact distribution in nats."""
    lost = exact.max(-1).values - exact.gather(-1, narrow.argmax(-1, keepdim=True)).squeeze(-1)
    log_probabilities = narrow.log_softmax(-1), exact.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(*log_probabilities, reduction="none", log_target=True).sum(-1)
    return float((lost < 0.01).float().mean()), float(divergence.mean())


def compare_bfloat16(checkpoint: Path, kernels: KernelChoice, texts: list[list[int]]) -> None:
    """Teacher forced over all positions of the texts, and no worse than `transformers` in bfloat16."""
    exact, theirs = Reference(checkpoint), Reference(checkpoint, torch.bfloat16)
    executor = open_executor(checkpoint, 16, kernels, "bfloat16")
    rng = np.random.default_rng(3)
    wanted = torch.cat([exact.logits(tokens) for tokens in texts])
    same, divergence = agreement(wanted, torch.cat([logits_of(executor, tokens, 200, rng) for tokens in texts]))
    _, their_divergence = agreement(wanted, torch.cat([theirs.logits(tokens) for tokens in texts]))
    assert same >= 0.99
    assert divergence <= 1.2 * their_divergence


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close(tmp_path: Path, family: Family, kernels: KernelChoice) -> None:
    checkpoint = write(tmp_path, family, (8, 2, 64), initializer_range=0.05)
    texts = np.random.default_rng(3).integers(0, 256, (8, 600))
    compare_bfloat16(checkpoint, kernels, texts.tolist())


@pytest.mark.long
def test_a_trained_model_is_close_in_bfloat16() -> None:
    """On text of the kind that it was trained on."""
    demo = Path(coppice.__file__).parent / "demo_model"
    text = "\n".join(doc for doc in map(inspect.getdoc, vars(builtins).values()) if doc)
    tokens = Tokenizer.from_file(str(demo / "tokenizer.json")).encode(text).ids
    compare_bfloat16(demo, "auto", [tokens[start : start + 400] for start in range(0, 4000, 400)])
