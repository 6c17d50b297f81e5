"""One model over several GPUs: NCCL's sums, alone and inside of graphs, against `transformers` and one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice_worker.edge.loading import Compute, load, resolve_settings
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.processes import Ranks
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, run_to_length
from tests.unit.worker.model.test_exactness_of_families import assert_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LENGTHS = (1, 5, 33, 90, 300)
NUM_NEW = 24


@contextmanager
def computing(checkpoint: Path, num_ranks: int, **more: Any) -> Iterator[Compute]:
    plain = {"model": str(checkpoint), "device": "cuda", "num_blocks": 64, "max_sequences": 8, "max_step_tokens": 512}
    settings = resolve_settings(WorkerSettings(tensor_parallel=num_ranks, **plain, **more))
    if num_ranks == 1:
        loaded = load(settings)
        yield Compute(loaded.executor, loaded.host)
        return
    with Ranks(settings) as ranks:
        loaded = load(settings, ranks.join())
        yield ranks.lead(loaded)


def generated(checkpoint: Path, num_ranks: int, **more: Any) -> list[DrivenSequence]:
    rng = np.random.default_rng(7)
    tables = allot_blocks([length + NUM_NEW for length in LENGTHS], 16, 64, rng)
    prompts = [[int(t) for t in rng.integers(0, 256, length)] for length in LENGTHS]
    sequences = [DrivenSequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    with computing(checkpoint, num_ranks, **more) as compute:
        run_to_length(compute.executor, sequences, [NUM_NEW] * len(sequences), chunk_max=64, rng=rng)
    return sequences


def test_float32_says_what_transformers_says(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen2")
    for sequence in generated(checkpoint, 2, dtype="float32"):
        assert_greedy(checkpoint, sequence)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_bfloat16_says_what_one_gpu_says(tmp_path: Path, cuda_graphs: bool) -> None:
    """But for ties of rounded sums, which end a comparison."""
    checkpoint = write_tiny_checkpoint(tmp_path, head_dim=64)
    ours = generated(checkpoint, 2, dtype="bfloat16", cuda_graphs=cuda_graphs)
    theirs = generated(checkpoint, 1, dtype="bfloat16", cuda_graphs=cuda_graphs)
    same = [
        one == other
        for a, b in zip(ours, theirs, strict=True)
        for one, other in zip(a.sampled[:4], b.sampled[:4], strict=True)
    ]
    assert np.mean(same) > 0.8


def test_the_pool_is_as_large_as_the_smallest_device_allows(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path)
    settings = WorkerSettings(
        model=str(checkpoint), device="cuda", tensor_parallel=2, gpu_memory_utilization=0.2, max_step_tokens=512
    )
    settings = resolve_settings(settings)
    with Ranks(settings) as ranks:
        compute = ranks.lead(load(settings, ranks.join()))
        last = np.array([compute.executor.pool.num_blocks - 1], np.int32)
        compute.executor.zero_blocks(last)
        compute.executor.copy_blocks(last, last - 1)
