"""`python -m tests.fakes.worker.poisoned_worker`: a gpu-worker whose device fails at a step with a certain token."""

from __future__ import annotations

from coppice_worker import __main__ as worker
from coppice_worker.core.batch.step_batch import StepBatch, StepOutput
from coppice_worker.edge import loading
from coppice_worker.model.executor import TorchExecutor

POISON = 66
ERROR = "CUDA error: an illegal memory access was encountered"


class PoisonedExecutor(TorchExecutor):
    """Fails like a device whose kernel touched what it must not."""

    def execute(self, batch: StepBatch) -> StepOutput:
        if (batch.token_ids == POISON).any():
            raise RuntimeError(f"{ERROR}\nCompile with TORCH_USE_CUDA_DSA to enable device-side assertions.")
        return super().execute(batch)


if __name__ == "__main__":
    loading.TorchExecutor = PoisonedExecutor  # type: ignore[misc]
    worker.leave(worker.main())
