"""How large a pool a device has room for: the arithmetic, and what an executor does with it. Nothing here has a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.edge import loading
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.model.config.errors import PoolTooSmall
from coppice_worker.model.executor import TorchExecutor
from coppice_worker.model.memory import FillDevice, MemoryUse, blocks_that_fit, measure
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.scheduler.step_driver import DrivenSequence, build_batch

GIB = 1 << 30
USE = MemoryUse(total=100 * GIB, free_before=99 * GIB, weights=20 * GIB, step=3 * GIB, libraries=GIB, graphs=2 * GIB)


def fit(use: MemoryUse, utilization: float = 0.9, num_blocks_min: int = 1) -> int:
    return blocks_that_fit(use, utilization=utilization, bytes_per_block=GIB, num_blocks_min=num_blocks_min)


def test_the_pool_gets_what_the_rest_leaves_of_the_share() -> None:
    assert fit(USE) == 90 - 20 - 3 - 1 - 2
    assert fit(USE, utilization=0.5) == 50 - 26


def test_what_others_hold_narrows_the_share_only_where_it_reaches_into_it() -> None:
    assert fit(replace(USE, free_before=92 * GIB)) == 64
    assert fit(replace(USE, free_before=60 * GIB)) == 60 - 26
    # Two workers with half of the device each: the second one finds the first one's half taken.
    assert fit(replace(USE, free_before=50 * GIB), utilization=0.5) == 50 - 26


def test_a_device_without_room_says_how_much_is_missing_and_what_to_change() -> None:
    assert fit(USE, num_blocks_min=64) == 64
    with pytest.raises(PoolTooSmall) as refused:
        fit(USE, num_blocks_min=70)
    assert "lacks 6.00 GiB" in refused.value.what
    assert "0.90 of 100.00 GiB" in refused.value.what
    assert "weights 20.00 GiB, a largest step 3.00 GiB, libraries 1.00 GiB, graphs 2.00 GiB" in refused.value.what
    for flag in ("--max-step-tokens", "--kv-dtype fp8", "--tensor-parallel", "--gpu-memory-utilization"):
        assert flag in refused.value.hint
    with pytest.raises(PoolTooSmall, match=r"of which only 10\.00 GiB were free"):
        fit(replace(USE, free_before=10 * GIB))


class FakeMemory:
    """A device on which tensors take what they are said to take, with `others` and `libraries` beside them."""

    def __init__(self, total: int, others: int = 0, weights: int = 0, step: int = 0, libraries: int = 0) -> None:
        self._total, self._others, self._weights = total, others, weights
        self._step, self._libraries = step, libraries
        self._peak = 10 * total  # of the loading, which does not count
        self.is_loaded = False

    def total_and_free(self) -> tuple[int, int]:
        held = self.reserved() + self._libraries if self.is_loaded else 0
        return self._total, self._total - self._others - held

    def allocated(self) -> int:
        return self._weights

    def allocated_peak(self) -> int:
        return self._peak

    def reserved(self) -> int:
        return self._weights + 2 * self._step

    def forget_peak(self) -> None:
        self.is_loaded = True
        self._peak = self._weights + self._step

    def release(self) -> None: ...


def test_a_measurement_tells_weights_a_step_and_libraries_apart() -> None:
    memory = FakeMemory(1000, others=50, weights=200, step=70, libraries=30)
    steps: list[str] = []
    use = measure(memory, memory.total_and_free()[1], lambda: steps.append("ran"), lambda: 9)
    assert use == MemoryUse(total=1000, free_before=950, weights=200, step=70, libraries=30, graphs=9)
    assert steps == ["ran"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("memory"))


@pytest.fixture
def filled(checkpoint: Path) -> Callable[[int], TorchExecutor]:
    def fill(pool_bytes: int) -> TorchExecutor:
        memory = FakeMemory(total=1000 + 2 * pool_bytes, weights=700, step=200, libraries=100)
        chosen = FillDevice(memory, utilization=(1000 + pool_bytes) / (1000 + 2 * pool_bytes))
        return TorchExecutor(checkpoint, num_blocks=chosen, limits=StepLimits(max_sequences=3, max_step_tokens=40))

    return fill


def test_an_executor_fills_its_device(
    filled: Callable[[int], TorchExecutor], checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixed = TorchExecutor(checkpoint, num_blocks=4)
    caplog.set_level(logging.INFO)
    executor = filled(7 * fixed.kv_bytes_per_block() + 10)
    assert executor.pool.num_blocks == 7
    assert "7 blocks of 16 tokens: " in caplog.text
    executor.warm_up()
    assert executor._pool.storage.abs().sum() == 0
    batch = build_batch([DrivenSequence(list(range(40)), [6, 2, 5])], [40], 16)
    on_four = build_batch([DrivenSequence(list(range(40)), [3, 2, 0])], [40], 16)
    assert np.array_equal(executor.execute(batch).tokens, fixed.execute(on_four).tokens)


def test_an_executor_refuses_a_device_on_which_no_step_fits(
    filled: Callable[[int], TorchExecutor], checkpoint: Path
) -> None:
    per_block = TorchExecutor(checkpoint, num_blocks=1).kv_bytes_per_block()
    assert filled(3 * per_block + 10).pool.num_blocks == 3
    with pytest.raises(PoolTooSmall, match="for a pool of 3 blocks"):
        filled(3 * per_block - 10)


def test_a_model_that_does_not_fit_is_an_error_in_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(loading, "TorchExecutor", allocate)
    settings = WorkerSettings(model=str(checkpoint), model_name="large", device="cpu", num_blocks=4)  # type: ignore[call-arg]
    with pytest.raises(PoolTooSmall, match=r"no room for large and its largest step: .*20\.00 GiB") as refused:
        loading.load(settings)
    assert "--tensor-parallel" in refused.value.hint
