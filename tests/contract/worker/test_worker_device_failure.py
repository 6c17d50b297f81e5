"""A worker process under hand-made plans: wrong handles cost their sequence, an error of the device the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from coppice.messages.registration import Register
from coppice.messages.step import RefusalCode, SequenceStart, StepPlan, StepResult
from coppice.session.link import Attached
from tests.contract.worker.test_worker_service import WAIT_S, Planner, handle, start, u32
from tests.fakes.cache.registrar import Registrar
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.worker.poisoned_worker import ERROR, POISON

ROOT = Path(__file__).parents[3]
START_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def registrar() -> Iterator[Registrar]:
    registrar = Registrar()
    yield registrar
    registrar.close()


@pytest.fixture
def worker(checkpoint: Path, registrar: Registrar) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start_worker() -> subprocess.Popen[str]:
        ports = ["--session-port=0", "--grpc-port=0", "--http-port=0"]
        args = [f"--model={checkpoint}", f"--cache={registrar.address}", "--device=cpu", "--num-blocks=8", *ports]
        args += ["--block-size=4", "--threads=1", "--log-level=error", "--kernels=torch"]
        command = [sys.executable, "-m", "tests.fakes.worker.poisoned_worker", *args]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield start_worker
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def registered(registrar: Registrar) -> Register:
    message = registrar.received.get(timeout=START_S)
    assert isinstance(message, Register)
    return message


def poisoned(sequence: int, owned: bytes) -> SequenceStart:
    return replace(start(sequence, 3, owned), tokens=u32(1, POISON, 2))


def codes(result: StepResult) -> dict[int, RefusalCode]:
    return {refusal.sequence_id: refusal.code for refusal in result.refusals}


@pytest.mark.wide
def test_wrong_handles_cost_their_sequence_and_a_failed_device_its_process(
    worker: Callable[[], subprocess.Popen[str]], registrar: Registrar
) -> None:
    process = worker()
    planner = Planner(registered(registrar).address, epoch=7)
    assert planner.next(Attached).server_epoch == 1
    first = planner.step(StepPlan(1, attach=(start(1, 2, handle(3, 5)),), rows=u32(1), row_tokens=u32(2)))
    assert first.sampled_ids == u32(1)
    ungranted = replace(start(4, 6, handle(4)), num_computed_tokens=4, shared=handle(2, 9), shared_seals=bytes(16))
    wrong = {
        2: start(2, 2, handle(3, 4)),  # an earlier generation
        3: start(3, 2, handle(3, 6)),  # a block in use, granted again
        4: ungranted,  # shared, and never granted
        5: start(5, 2, handle(1 << 20)),  # a block that the pool does not have
    }
    rows = u32(*wrong, 1)
    second = planner.step(StepPlan(2, attach=tuple(wrong.values()), rows=rows, row_tokens=u32(2, 2, 2, 2, 1)))
    assert codes(second)[3] == RefusalCode.DOUBLE_GRANT
    assert {n for n, code in codes(second).items() if code == RefusalCode.STALE} >= {2, 4}
    assert set(codes(second)) == set(wrong)
    assert second.sampled_ids == u32(1)
    third = planner.step(StepPlan(3, detach=u32(*wrong), rows=u32(1), row_tokens=u32(1)))
    assert (third.refusals, third.sampled_ids) == ((), u32(1))
    assert process.poll() is None

    planner.link.post(StepPlan(4, attach=(poisoned(9, handle(6)),), rows=u32(9), row_tokens=u32(3)), 1)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 1
    said = [line for line in errors.splitlines() if line.startswith("python -m coppice_worker: ")]
    assert len(said) == 1
    assert f"the device failed: {ERROR}" in said[0]
    assert "started again" in said[0]
    planner.close()

    worker()
    again = registered(registrar)
    assert (again.worker_epoch, again.generations) == (0, bytes(8 * 8)), "nothing of the dead epoch is known"
    heir = Planner(again.address, epoch=8)
    assert heir.next(Attached).server_epoch == 2
    plan = StepPlan(1, attach=(start(1, 2, handle(3, 5)),), rows=u32(1), row_tokens=u32(2))
    assert heir.step(plan).sampled_tokens == first.sampled_tokens
    heir.close()
