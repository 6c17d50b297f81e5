"""Manifests for Kubernetes against its own schemas, those of several versions, where no field may be one too many."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fakes.tools.kustomize import built
from tests.unit.tools.render.test_kubernetes import OVERLAYS, rendered

pytestmark = pytest.mark.programs


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_overlays_are_valid(bin_folder: Path, tmp_path: Path, version: str) -> None:
    files = rendered(tmp_path, "--workers", "2", "--gpus-per-worker", "4", "--storage-class", "fast")
    for overlay in OVERLAYS:
        path = tmp_path / f"{overlay}.yaml"
        path.write_text(yaml.safe_dump_all(built(files, f"overlays/{overlay}")), encoding="utf-8")
        command = [str(bin_folder / "kubernetes-validate"), "--strict", "-k", version, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed for resource statefulset/worker" in done.stdout + done.stderr


def test_a_field_that_is_none_is_found(bin_folder: Path, tmp_path: Path) -> None:
    objects = built(rendered(tmp_path), "base")
    (worker,) = [one for one in objects if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "worker"]
    worker["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(worker), encoding="utf-8")
    command = [str(bin_folder / "kubernetes-validate"), "--strict", str(path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
