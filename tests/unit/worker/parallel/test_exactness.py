"""A model that ranks share out says token for token what it says alone, and what `transformers` says."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from coppice.errors import UsageError
from coppice_worker.core.batch.step_batch import PromptTokens
from coppice_worker.edge.loading import resolve_settings
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.parallel.follower import follow_copies
from coppice_worker.parallel.tiers import Progress, SharedOutTiers
from tests.fakes.checkpoints import Family, write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, build_batch, run_to_length
from tests.fakes.worker.ranks import shared_out
from tests.unit.worker.model.test_exactness_of_families import assert_greedy
from tests.unit.worker.model.test_step_graphs import OTHERS, Planned, Watched, plain

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_LENGTHS = (1, 5, 33, 90)
NUM_NEW = 10

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True, "vocab_size": 321},
    "qwen2 14/2": {"family": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},
    "gemma2": {"family": "gemma2"},
    "6/1, one head for two ranks": {
        "family": "qwen2",
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "tie": True,
    },
}


def check(checkpoint: Path, size: int, **options: Any) -> None:
    rng = np.random.default_rng(7)
    tables = allot_blocks([length + NUM_NEW for length in PROMPT_LENGTHS], 16, 48, rng)
    prompts = [[int(t) for t in rng.integers(0, 256, length)] for length in PROMPT_LENGTHS]
    sequences = [DrivenSequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    with shared_out(checkpoint, size, num_blocks=48, **options) as (executor, _):
        run_to_length(executor, sequences, [NUM_NEW] * len(sequences), chunk_max=40, rng=rng)
    for sequence in sequences:
        assert_greedy(checkpoint, sequence)
    different = {token for sequence in sequences for token in sequence.sampled}
    assert len(different) > 8, "a model that repeats a few tokens proves nothing"


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(tmp_path: Path, name: str) -> None:
    check(write_tiny_checkpoint(tmp_path, **MODELS[name]), 2)


@pytest.mark.long
@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"block_size": 64}])
def test_four_ranks_share_two_heads(tmp_path: Path, family: Family, options: dict[str, Any]) -> None:
    check(write_tiny_checkpoint(tmp_path, family, num_attention_heads=8, num_key_value_heads=2), 4, **options)


@pytest.mark.parametrize("other", OTHERS)
def test_every_rank_replays_graphs_and_runs_ahead(tmp_path: Path, other: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2", eos_token_id=None)
    with shared_out(checkpoint, 2, Watched) as (executor, of_ranks):
        found = Planned(executor).generate(OTHERS["greedy"], OTHERS[other])
    wanted = Planned(plain(checkpoint)).generate(OTHERS["greedy"], OTHERS[other])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    first, second = of_ranks
    assert first.recorded.num_replays == second.recorded.num_replays > 10
    assert first.num_followed == second.num_followed
    assert first.num_followed > 0 or other in ("penalised", "reported")


def test_what_is_drawn_and_reported_is_as_of_one_rank(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    tokens = np.random.default_rng(3).integers(0, 256, 40)
    sequence = DrivenSequence(tokens.tolist(), [5, 0, 2], temperature=0.9, top_k=40, top_p=0.95, seed=11)
    plain = build_batch([sequence], [40], 16)
    sample = replace(plain.sample, num_logprobs=np.array([3], np.int32))
    starts = np.array([0, 39], np.int64)
    two = np.array([2], np.int32)
    zero = np.zeros(1, np.int32)
    prompt = PromptTokens(zero, starts, np.ones(1, np.int64), two, np.arange(39), tokens[1:])
    batch = replace(plain, sample=sample, prompt=prompt)
    alone = TorchExecutor(checkpoint, num_blocks=8).execute(batch)
    with shared_out(checkpoint, 2, num_blocks=8) as (executor, _):
        together = executor.execute(batch)
    np.testing.assert_equal(together.tokens, alone.tokens)
    for ours, theirs in ((together.logprobs, alone.logprobs), (together.prompt_logprobs, alone.prompt_logprobs)):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_equal(ours.top_ids, theirs.top_ids)
        np.testing.assert_allclose(ours.chosen, theirs.chosen, atol=1e-4)
        np.testing.assert_allclose(ours.top, theirs.top, atol=1e-4)


def test_blocks_are_zeroed_and_copied_on_every_rank(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, 256, 32)]
    with shared_out(checkpoint, 2, num_blocks=8) as (executor, of_ranks):
        step = build_batch([DrivenSequence(tokens, [0, 4])], [32], 16)
        executor.execute(step)
        executor.copy_blocks(np.array([4], np.int32), np.array([2], np.int32))
        executor.zero_blocks(np.array([4], np.int32))
        # Ranks do as they are told in order, so all of them are through when this step's sums are.
        executor.execute(build_batch([DrivenSequence(tokens[:1], [7])], [1], 16))
        for of_rank in of_ranks:
            blocks = of_rank._pool.storage.flatten(0, 1)
            assert blocks[:, 2].count_nonzero() == blocks[:, 2].numel()
            assert blocks[:, 4].count_nonzero() == 0
        first, second = (of_rank._pool.storage[:, :, 0] for of_rank in of_ranks)
        assert first.shape == second.shape
        assert not torch.equal(first, second), "each rank holds heads of its own"


def test_each_rank_has_its_part_of_a_block_on_the_host(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, 256, 33)]
    blocks, elsewhere, on_host = (np.array(ids, np.int32) for ids in ([1, 6], [3, 0], [2, 0]))
    with shared_out(checkpoint, 2, num_blocks=8) as (executor, of_ranks):
        expected = executor.execute(build_batch([DrivenSequence(tokens, [*blocks, 5])], [33], 16)).tokens
        first, second = (of_rank.host_pool(3) for of_rank in of_ranks)
        ours, theirs = socket.socketpair()
        copying = threading.Thread(target=follow_copies, args=(second, theirs, Progress()))
        copying.start()
        tiers = SharedOutTiers(first, {1: ours}, lambda: 0)
        tiers.demote(blocks, on_host)
        executor.zero_blocks(blocks)
        executor.execute(build_batch([DrivenSequence(tokens[:1], [7])], [1], 16))  # then it is done on all ranks
        tiers.promote(on_host, elsewhere)
        ours.close()
        copying.join()
        again = DrivenSequence(tokens, [*elsewhere, 5], num_computed_tokens=32)
        np.testing.assert_equal(executor.execute(build_batch([again], [1], 16)).tokens, expected)


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="3 ranks cannot share the model's 4 heads"):
        resolve_settings(WorkerSettings(model=str(checkpoint), tensor_parallel=3, device="cpu"))
