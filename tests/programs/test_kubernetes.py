"""Manifests for Kubernetes against its own schemas, those of several versions, where no field may be one too many."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.tools.kustomize import built
from tests.programs.conftest import ASKED
from tests.unit.tools.render.test_kubernetes import OVERLAYS, rendered

pytestmark = pytest.mark.programs
VERSIONS = ("1.29", "1.37")
KUBERAY = Path(__file__).resolve().parents[2] / "deploy" / "kuberay" / "rayjob.yaml"
DEFINITIONS = os.environ.get("COPPICE_TEST_CRDS", "")  # a folder of the operators' own definitions, where there is one


@pytest.mark.parametrize("version", VERSIONS)
def test_overlays_are_valid(bin_folder: Path, tmp_path: Path, version: str) -> None:
    files = rendered(tmp_path, "--workers", "2", "--gpus-per-worker", "4", "--storage-class", "fast")
    for overlay in OVERLAYS:
        path = tmp_path / f"{overlay}.yaml"
        path.write_text(yaml.safe_dump_all(built(files, f"overlays/{overlay}")), encoding="utf-8")
        done = validated(bin_folder, path, version)
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


def validated(bin_folder: Path, path: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [str(bin_folder / "kubernetes-validate"), "--strict", "-k", version, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_of_groups_are_valid(bin_folder: Path, tmp_path: Path, overlay: str) -> None:
    """As templates, since the schemas of Kubernetes have no LeaderWorkerSet; and the objects around them."""
    (group,) = groups(tmp_path / "groups", overlay)
    objects = built(rendered(tmp_path, "--gpus-per-worker", "8", "--nodes-per-worker", "2"), f"overlays/{overlay}")
    objects = [one for one in objects if one["kind"] != "LeaderWorkerSet"]
    templates = group["spec"]["leaderWorkerTemplate"]
    objects += [pod_template(name, templates[f"{name}Template"]) for name in ("leader", "worker")]
    assert_pods_are_valid(bin_folder, tmp_path, objects)


def test_pods_of_a_ray_cluster_are_valid(bin_folder: Path, tmp_path: Path) -> None:
    job, *objects = yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = {"head": cluster["headGroupSpec"], "worker": workers}
    objects += [pod_template(name, pod["template"]) for name, pod in pods.items()]
    assert_pods_are_valid(bin_folder, tmp_path, objects)


def pod_template(name: str, template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}


def assert_pods_are_valid(bin_folder: Path, folder: Path, objects: list[dict[str, Any]]) -> None:
    path = folder / "pods.yaml"
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    for version in VERSIONS:
        done = validated(bin_folder, path, version)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed for resource podtemplate/worker" in done.stdout + done.stderr


# ---- objects of operators ----


def operators_objects(folder: Path) -> list[dict[str, Any]]:
    files = rendered(folder, "--workers", "2", "--workers-max", "5")
    found = [one for component in ("monitoring", "autoscaling") for one in built(files, f"components/{component}")]
    job, *_ = yaml.safe_load_all(KUBERAY.read_text(encoding="utf-8"))
    return [*found, *groups(folder / "groups", "gpu"), job]


def groups(folder: Path, overlay: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    objects = built(rendered(folder, "--gpus-per-worker", "8", "--nodes-per-worker", "2"), f"overlays/{overlay}")
    return [one for one in objects if one["kind"] == "LeaderWorkerSet"]


def wrong_with(bin_folder: Path, folder: Path, objects: list[dict[str, Any]], definitions: str = "") -> list[str]:
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    command = [str(bin_folder / "python"), str(ASKED / "custom_resources.py"), str(path)]
    done = subprocess.run(
        [*command, *([definitions] if definitions else [])], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    found = done.stdout.splitlines()
    assert done.returncode == (1 if any(found) else 0)
    return [line for line in found if line]


def test_objects_of_operators_are_valid(bin_folder: Path, tmp_path: Path) -> None:
    objects = operators_objects(tmp_path)
    kinds = {"ServiceMonitor", "ScaledObject", "Certificate", "LeaderWorkerSet", "RayJob"}
    assert {one["kind"] for one in objects} == kinds
    assert wrong_with(bin_folder, tmp_path, objects, DEFINITIONS) == []


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("ServiceMonitor", {"namespaces": []}, "spec: Additional properties are not allowed ('namespaces' was"),
        ("ServiceMonitor", {"endpoints": [{"port": 8071}]}, "spec.endpoints[0].port: 8071 is not of type 'string'"),
        ("ScaledObject", {"maxReplicaCount": "5"}, "spec.maxReplicaCount: '5' is not of type 'integer'"),
        ("ScaledObject", {"triggers": [{"type": "prometheus"}]}, "spec.triggers[0]: 'metadata' is a required property"),
        ("LeaderWorkerSet", {"size": 2}, "spec: Additional properties are not allowed ('size' was unexpected)"),
        ("LeaderWorkerSet", {"leaderWorkerTemplate": {}}, "spec.leaderWorkerTemplate: 'workerTemplate' is a required"),
        (
            "RayJob",
            {"rayVersion": "2.60.0"},
            "spec: Additional properties are not allowed ('rayVersion' was unexpected)",
        ),
        ("RayJob", {"rayClusterSpec": {}}, "spec.rayClusterSpec: 'headGroupSpec' is a required property"),
        ("Certificate", {"usages": ["signing of all"]}, "spec.usages[0]: 'signing of all' is not one of"),
    ],
)
def test_what_is_wrong_with_them_is_found(
    bin_folder: Path, tmp_path: Path, kind: str, change: dict[str, Any], problem: str
) -> None:
    one = next(one for one in operators_objects(tmp_path) if one["kind"] == kind)
    one["spec"] |= change
    found = wrong_with(bin_folder, tmp_path, [one])
    assert any(line.startswith(f"{kind} {one['metadata']['name']}: {problem}") for line in found), found


def test_a_definition_that_differs_from_what_we_wrote_is_found(bin_folder: Path, tmp_path: Path) -> None:
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    triggers = {"type": "array", "items": {"type": "object", "required": ["authentication"], "properties": {}}}
    spec = {"type": "object", "properties": {"triggers": triggers, "maxReplicaCount": {"type": "string"}}}
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    named = {
        "group": "keda.sh",
        "names": {"kind": "ScaledObject"},
        "versions": [{"name": "v1alpha1", "schema": schema}],
    }
    definition = {"kind": "CustomResourceDefinition", "spec": named}
    (definitions / "keda.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
    found = "\n".join(wrong_with(bin_folder, tmp_path, operators_objects(tmp_path), str(definitions)))
    for problem in (
        "has no definition of ServiceMonitor",
        "ScaledObject: spec.maxReplicaCount is of type string, not integer",
        "ScaledObject: spec.pollingInterval is no field",
        "ScaledObject: spec.triggers[] has to have authentication",
        "ScaledObject worker: spec: Additional properties are not allowed",
    ):
        assert problem in found, found
