"""KV of a loaded model in files: every bit comes back, to the next process too, and only to one of the same model."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.ids import WorkerEpoch
from coppice_worker.disk.disk_pool import DiskPool
from coppice_worker.edge import loading
from coppice_worker.edge.loading import Loaded
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.kernels.host_pool import HostPool
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.waiting import wait_for
from tests.unit.worker.disk.files import handles, ids, seals

EPOCH = WorkerEpoch(5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def loaded(checkpoint: Path, disk: Path, **more: object) -> tuple[Loaded, HostPool, DiskPool]:
    settings = {"model": str(checkpoint), "num_blocks": 6, "device": "cpu", "threads": 1, "kernels": "torch"}
    settings |= {"host_memory_mib": 1, "disk_folder": str(disk), "disk_mib": 1} | more
    found = loading.load(loading.resolve_settings(WorkerSettings(**settings)))  # type: ignore[arg-type]
    assert found.host is not None
    assert found.disk is not None
    return found, found.host, found.disk


def ended(disk: DiskPool) -> None:
    """As the kernel does it."""
    disk._folder.close()
    gc.collect()


def test_what_went_to_the_disk_is_on_the_device_again_bit_by_bit(
    checkpoint: Path, tmp_path: Path, one_thread: None
) -> None:
    first, host, disk = loaded(checkpoint, tmp_path)
    torch.manual_seed(5)
    planes = first.executor._pool.planes()
    for plane in planes:
        plane.copy_(torch.randint(-(1 << 31), 1 << 31, plane.shape, dtype=torch.int32))
    before = [plane[:, :2].clone() for plane in planes]
    host.demote(ids(0, 1), ids(3, 4))
    disk.begin(EPOCH)
    assert disk.store(EPOCH, ids(3, 4), handles(5, 6), seals(1, 2)).all()
    ended(disk)

    again, host, disk = loaded(checkpoint, tmp_path)
    assert disk.reported()[0] == EPOCH
    assert np.flatnonzero(disk.reported()[1]).tolist() == [5, 6]
    after = WorkerEpoch(EPOCH + 1)
    disk.begin(after, keeps=True)
    assert disk.load(after, handles(6, 5), seals(2, 1), ids(8, 7))[0].all()
    host.promote(ids(7, 8), ids(2, 3))
    for plane, expected in zip(again.executor._pool.planes(), before, strict=True):
        assert torch.equal(plane[:, 2:4], expected)
    ended(disk)


def test_another_model_type_or_file_has_another_folder_and_takes_the_one_before_away(
    checkpoint: Path, tmp_path: Path, one_thread: None
) -> None:
    _, _, disk = loaded(checkpoint, tmp_path)
    disk.begin(EPOCH)
    assert disk.store(EPOCH, ids(3), handles(5), seals(1)).all()
    ended(disk)
    (worker,) = tmp_path.iterdir()
    for change in ({"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"model_name": "other"}):
        _, _, disk = loaded(checkpoint, tmp_path, **change)
        assert disk.reported()[0] == 0, change
        wait_for(lambda: len(list(worker.iterdir())) == 1, "the folder of before to go")
        ended(disk)
    weights = next(checkpoint.glob("*.safetensors"))
    _, _, disk = loaded(checkpoint, tmp_path)
    disk.begin(EPOCH)
    assert disk.store(EPOCH, ids(3), handles(5), seals(1)).all()
    ended(disk)
    weights.touch()
    assert loaded(checkpoint, tmp_path)[2].reported()[0] == 0


@pytest.mark.parametrize("change", ["torch", "instructions"])
def test_other_libraries_and_other_instructions_have_another_folder(
    change: str, checkpoint: Path, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, disk = loaded(checkpoint, tmp_path)
    disk.begin(EPOCH)
    assert disk.store(EPOCH, ids(3), handles(5), seals(1)).all()
    ended(disk)
    if change == "torch":
        monkeypatch.setattr(loading, "versions", lambda: {"torch": "0.0.1", "triton": "3.7.1"})
    else:
        monkeypatch.setattr(loading, "cpu_flags", lambda: frozenset({"sse2"}))
    assert loaded(checkpoint, tmp_path)[2].reported()[0] == 0
