"""The executor's own promises, apart from the numbers of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from coppice_worker.core.batch.step_batch import Executor, PoolSpec, SampleRows
from coppice_worker.kernels.choice import prefers_triton
from coppice_worker.model.executor import TorchExecutor
from tests.fakes.checkpoints import LLAMA3_ROPE, write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("executor"), rope_scaling=LLAMA3_ROPE)


@pytest.fixture
def executor(checkpoint: Path) -> TorchExecutor:
    return TorchExecutor(checkpoint, num_blocks=12, block_size=BLOCK_SIZE)


def blocks(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


def test_describes_itself(executor: TorchExecutor) -> None:
    seam: Executor = executor
    assert seam.pool == PoolSpec(num_blocks=12, block_size=BLOCK_SIZE)
    info = executor.info
    assert (info.family, info.kv_dtype, info.vocab_size, info.max_context) == ("llama", "float32", 320, 2048)
    assert info.eos_token_ids == (257,)
    assert info.rope.kind == "llama3"
    assert len(info.checkpoint_digest) == 32
    namespace = executor.namespace
    assert (namespace.revision, namespace.kv_dtype, namespace.block_size) == (info.checkpoint_digest, "float32", 16)
    assert namespace.rope == "llama3 10000.0 8.0 1.0 4.0 64"


def test_unknown_choices_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        TorchExecutor(checkpoint, num_blocks=1, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto, native, torch, triton, flashinfer"):
        TorchExecutor(checkpoint, num_blocks=1, kernels="cuda")  # type: ignore[arg-type]


def test_triton_is_for_narrow_dtypes_on_cuda() -> None:
    assert prefers_triton("cuda", torch.bfloat16)
    assert not prefers_triton("cuda", torch.float32)
    assert not prefers_triton("cpu", torch.bfloat16)


def test_threads_are_the_callers_choice(checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        TorchExecutor(checkpoint, num_blocks=1, num_threads=2)
        assert torch.get_num_threads() == 2
        TorchExecutor(checkpoint, num_blocks=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_chunk_that_samples_nothing_returns_nothing(executor: TorchExecutor) -> None:
    batch = build_batch([DrivenSequence(prompt(20), [3, 4])], [7], BLOCK_SIZE)
    tokens = executor.execute(batch).tokens
    assert tokens.shape == (0,)
    assert tokens.dtype == np.int32


def test_copied_blocks_continue_like_the_original(executor: TorchExecutor) -> None:
    """A fork reads its copy of the tail block; the original writes on without the fork noticing."""
    tokens = prompt(21)
    original = DrivenSequence(tokens, [2, 5])
    executor.execute(build_batch([original], [20], BLOCK_SIZE))
    original.num_computed_tokens = 20
    executor.copy_blocks(blocks(5), blocks(9))
    fork = replace(original, blocks=[2, 9])
    other = replace(original, tokens=[*tokens[:20], (tokens[20] + 1) % 256])
    executor.execute(build_batch([other], [1], BLOCK_SIZE))
    alone = full_prefill_logits(executor, tokens, [0, 1])
    torch.testing.assert_close(executor.logits(build_batch([fork], [1], BLOCK_SIZE)), alone, atol=1e-5, rtol=1e-5)


def full_prefill_logits(executor: TorchExecutor, tokens: list[int], table: list[int]) -> torch.Tensor:
    return executor.logits(build_batch([DrivenSequence(tokens, table)], [len(tokens)], BLOCK_SIZE))


def test_zeroed_blocks_hold_nothing(executor: TorchExecutor) -> None:
    executor.execute(build_batch([DrivenSequence(prompt(40), [2, 5, 7])], [40], BLOCK_SIZE))
    storage = executor._pool.storage
    assert all(storage[:, :, block].abs().sum() > 0 for block in (2, 5, 7))
    executor.zero_blocks(blocks(2, 7))
    assert storage[:, :, [2, 7]].abs().sum() == 0
    assert storage[:, :, 5].abs().sum() > 0
    executor.zero_blocks(blocks())
    executor.copy_blocks(blocks(), blocks())


def test_warm_up_meets_every_kind_of_logits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for the type of what they read, and changed logits are float32."""
    executor = TorchExecutor(checkpoint, dtype="bfloat16", num_blocks=1, kernels="torch")
    met = set()

    def choose(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        met.add((logits.dtype, bool(rows.temperature.any())))
        return torch.zeros(len(logits), dtype=torch.int64)

    monkeypatch.setattr(executor._backend.arithmetic, "choose", choose)
    executor.warm_up()
    assert met == {(dtype, drawn) for dtype in (torch.bfloat16, torch.float32) for drawn in (False, True)}


def test_warm_up_leaves_no_trace(executor: TorchExecutor) -> None:
    executor.warm_up()
    assert executor._pool.storage.abs().sum() == 0


def test_neighbours_do_not_change_sampled_tokens(executor: TorchExecutor) -> None:
    def sequence(seed: int, table: list[int]) -> DrivenSequence:
        return DrivenSequence(prompt(18, seed), table, temperature=0.8, top_k=50, top_p=0.95, seed=seed)

    sequences = [sequence(seed, [2 * seed, 2 * seed + 1]) for seed in range(6)]
    together = executor.execute(build_batch(sequences, [18] * 6, BLOCK_SIZE)).tokens
    alone = [int(executor.execute(build_batch([s], [18], BLOCK_SIZE)).tokens[0]) for s in sequences]
    assert together.tolist() == alone
    assert len(set(alone)) > 3


def test_inconsistent_batches_are_caught(executor: TorchExecutor) -> None:
    batch = build_batch([DrivenSequence(prompt(20), [3, 4])], [7], BLOCK_SIZE)
    with pytest.raises(AssertionError):
        executor.execute(replace(batch, slots=batch.slots[1:]))
    with pytest.raises(AssertionError):
        executor.execute(replace(batch, context_lens=blocks(6)))
    with pytest.raises(AssertionError):
        executor.execute(replace(batch, query_starts=blocks(0, 8)))


def test_tiny_checkpoint_has_a_working_tokenizer(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Grüße, 你好!\n\tx"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 256
    assert tokenizer.token_to_id("<|bos|>") == 256
    assert tokenizer.token_to_id("<|eos|>") == 257
    chat = AutoTokenizer.from_pretrained(checkpoint)
    rendered = chat.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|><|user|>hi<|assistant|>"
    assert chat(rendered)["input_ids"] == tokenizer.encode(rendered).ids
