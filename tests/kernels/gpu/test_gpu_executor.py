"""Steps as CUDA graphs on a real device: what they choose, what they wait for, and the memory that they are given."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.handles import BLOCKS_MAX
from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.graphs import CudaGraphs
from coppice_worker.model.memory import CudaMemory, FillDevice
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, allot_blocks, build_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK_SIZE = 16
NUM_BLOCKS = 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen2", eos_token_id=None)


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> TorchExecutor:
    device = torch.device("cuda")
    executor = TorchExecutor(
        checkpoint,
        device="cuda",
        dtype="bfloat16",
        num_blocks=NUM_BLOCKS + NUM_BLOCKS // 2,
        limits=StepLimits(40, 512),
        graphs=partial(CudaGraphs, device),
    )
    executor.warm_up()
    assert executor._pool.storage.abs().sum() == 0
    return executor


@pytest.fixture
def nan_pool(executor: TorchExecutor) -> None:
    executor._pool.storage.fill_(float("nan"))


def prefilled(executor: TorchExecutor, count: int, seed: int, temperature: float = 0.0) -> list[DrivenSequence]:
    """Sequences whose next token is not computed yet."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 120, count)
    tables = allot_blocks([int(n) + 20 for n in lengths], BLOCK_SIZE, NUM_BLOCKS, rng)
    sequences = [
        DrivenSequence([int(t) for t in rng.integers(0, 256, n)], table, temperature=temperature, top_p=0.9, seed=i)
        for i, (n, table) in enumerate(zip(lengths, tables, strict=True))
    ]
    for sequence in sequences:
        executor.execute(build_batch([sequence], [len(sequence.tokens)], BLOCK_SIZE))
        sequence.num_computed_tokens = len(sequence.tokens)
        sequence.tokens.append(int(rng.integers(0, 256)))
    return sequences


@pytest.mark.usefixtures("nan_pool")
@pytest.mark.parametrize("count", [1, 3, 7, 17, 33])
def test_graphs_choose_what_single_launches_find_likeliest(executor: TorchExecutor, count: int) -> None:
    sequences = prefilled(executor, count, seed=count)
    for _ in range(4):
        batch = build_batch(sequences, [1] * count, BLOCK_SIZE)
        logits = executor.logits(batch).float()
        assert executor.runs_ahead(batch)
        tokens = torch.from_numpy(executor.execute(batch).tokens).long().cuda().unsqueeze(1)
        # Padded products round differently: a token that is as good as the likeliest is as good.
        missing = logits.amax(dim=-1, keepdim=True) - logits.gather(1, tokens)
        assert float(missing.max()) < 0.02 * float(logits.abs().max())
        for sequence, token in zip(sequences, tokens[:, 0].tolist(), strict=True):
            sequence.num_computed_tokens += 1
            sequence.tokens.append(token)
    written = ~executor._pool.storage.isnan().all(dim=(0, 1, 3, 5))
    assert int(written.sum()) == sum(sequence.num_computed_tokens for sequence in sequences)


@pytest.mark.usefixtures("nan_pool")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_launch_waits_for_nothing_and_the_next_one_takes_its_tokens(
    executor: TorchExecutor, temperature: float
) -> None:
    sequences = prefilled(executor, 9, seed=1, temperature=temperature)
    first = build_batch(sequences, [1] * 9, BLOCK_SIZE)
    alone = [executor.execute(first).tokens]
    for sequence, token in zip(sequences, alone[0].tolist(), strict=True):
        sequence.num_computed_tokens += 1
        sequence.tokens.append(token)
    second = build_batch(sequences, [1] * 9, BLOCK_SIZE)
    alone.append(executor.execute(second).tokens)

    void = replace(second, token_ids=np.full_like(second.token_ids, 300), follows=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = executor.launch(first)
        following = executor.launch(void)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.wait().tokens.tolist() == alone[0].tolist()
    assert following.wait().tokens.tolist() == alone[1].tolist()


def test_a_pool_fills_its_share_of_the_device(checkpoint: Path) -> None:
    device = torch.device("cuda")
    memory = CudaMemory(device)
    total, free = memory.total_and_free()
    utilization = 0.2 * free / total
    executor = TorchExecutor(
        checkpoint,
        device="cuda",
        dtype="bfloat16",
        num_blocks=FillDevice(memory, utilization),
        block_size=64,
        limits=StepLimits(40, 512),
        graphs=partial(CudaGraphs, device),
    )
    executor.warm_up()
    taken = free - memory.total_and_free()[1]
    assert executor.pool.num_blocks < BLOCKS_MAX, "the device is the limit"
    assert 0.97 * utilization * total < taken < 1.02 * utilization * total


def test_a_chunk_that_samples_nothing_is_over_when_it_is_answered(executor: TorchExecutor) -> None:
    """Its time is the device's, and its faults are its own."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 256, 400)]
    (table,) = allot_blocks([400], BLOCK_SIZE, executor.pool.num_blocks, np.random.default_rng(0))
    batch = build_batch([DrivenSequence(tokens, table)], [399], BLOCK_SIZE)
    for _ in range(3):
        assert executor.execute(batch).tokens.size == 0
        assert torch.cuda.current_stream().query()


@pytest.mark.usefixtures("nan_pool")
@pytest.mark.parametrize("chunks", [[15], [60, 3], [200, 30, 2], [470]])
def test_mixed_graphs_find_what_single_launches_find(executor: TorchExecutor, chunks: list[int]) -> None:
    sequences = prefilled(executor, 7, seed=len(chunks))
    rng = np.random.default_rng(sum(chunks))
    rows = [*sequences]
    # Behind the tables of `prefilled` nobody has blocks; each chunk comes after 40 tokens that are there.
    tables = allot_blocks([40 + new + 20 for new in chunks], BLOCK_SIZE, NUM_BLOCKS // 2, rng)
    for new, table in zip(chunks, tables, strict=True):
        prompt = [int(t) for t in rng.integers(0, 256, 40 + new)]
        row = DrivenSequence(prompt, [block + NUM_BLOCKS for block in table])
        executor.execute(build_batch([row], [40], BLOCK_SIZE))
        row.num_computed_tokens = 40
        rows.append(row)
    batch = build_batch(rows, [*[1] * len(sequences), *chunks], BLOCK_SIZE)
    logits = executor.logits(batch).float()
    assert executor._graphs is not None
    with torch.inference_mode():
        assert executor._graphs.hidden(batch) is not None, "it has a graph"
    tokens = torch.from_numpy(executor.execute(batch).tokens).long().cuda().unsqueeze(1)
    missing = logits.amax(dim=-1, keepdim=True) - logits.gather(1, tokens)
    assert float(missing.max()) < 0.02 * float(logits.abs().max())


@pytest.mark.usefixtures("nan_pool")
def test_kernels_of_one_row_that_overlap_find_what_they_find_in_order(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that read what the one before it had not written yet would find something else now and then."""
    batch = build_batch(prefilled(executor, 1, seed=5), [1], BLOCK_SIZE)
    overlapping = [executor.logits(batch).clone() for _ in range(50)]
    monkeypatch.setattr("coppice_worker.kernels.triton.overlap._can_overlap", lambda: False)
    in_order = executor.logits(batch)
    assert all(torch.equal(logits, in_order) for logits in overlapping)
