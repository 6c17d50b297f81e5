"""Workers on several nodes as a LeaderWorkerSet: each pod knows its place, and nobody else reaches other nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice.tls.identity import Role, parse_identity
from coppice_worker.edge.settings import WorkerSettings
from tests.fakes.tools.kustomize import built
from tests.unit.tools.render.test_kubernetes import OVERLAYS, Objects, container, kind, rendered

WORDS = ("--workers", "3", "--gpus-per-worker", "8", "--nodes-per-worker", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return rendered(tmp_path_factory.mktemp("render"), *WORDS)


@pytest.fixture(params=OVERLAYS)
def objects(files: dict[str, str], request: pytest.FixtureRequest) -> Objects:
    return built(files, f"overlays/{request.param}")


def templates(objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of node 0, and of the others."""
    (group,) = kind(objects, "LeaderWorkerSet")
    said = group["spec"]["leaderWorkerTemplate"]
    return said["leaderTemplate"], said["workerTemplate"]


def settings_of(pod: dict[str, Any], name: str, index: int) -> WorkerSettings:
    """As a kubelet gives variables to the process, those of the operator first."""
    found = {"LWS_LEADER_ADDRESS": "worker-0.worker.coppice", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}
    for one in container(pod)["env"]:
        value = one.get("value", name)
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda reference: found[reference[1]], value)
    return parse_settings(WorkerSettings, [], found, "worker")


def test_each_pod_knows_its_place(objects: Objects) -> None:
    zero, other = templates(objects)
    of_zero, of_other = settings_of(zero, "worker-0", 0), settings_of(other, "worker-0-1", 1)
    for settings in (of_zero, of_other):
        assert str(settings.meets_at) == "worker-0.worker.coppice:29500"
        assert (settings.nnodes, settings.tensor_parallel) == (2, 8)
        settings.check_listening()
    assert (of_zero.ranks_here, of_other.ranks_here) == (range(4), range(4, 8))
    assert (of_zero.worker_id, of_zero.advertise) == ("worker-0", "worker-0.worker:7082")
    same = {"node_rank", "worker_id", "advertise"}
    assert of_zero.model_dump(exclude=same) == of_other.model_dump(exclude=same)


def test_groups_of_two_are_the_workers(files: dict[str, str]) -> None:
    for overlay, gpus in (("cpu", None), ("gpu", "4"), ("ha", "4")):
        objects = built(files, f"overlays/{overlay}")
        (group,) = kind(objects, "LeaderWorkerSet")
        assert "worker" not in {one["metadata"]["name"] for one in kind(objects, "StatefulSet")}
        assert (group["apiVersion"], group["metadata"]["name"]) == ("leaderworkerset.x-k8s.io/v1", "worker")
        assert (group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]) == (3, 2)
        for pod in templates(objects):
            assert container(pod)["resources"]["limits"].get("nvidia.com/gpu") == gpus
            mounts = [mount["name"] for mount in container(pod)["volumeMounts"]]
            assert sorted(mounts) == sorted(volume["name"] for volume in pod["spec"]["volumes"])
            assert ("shm" in mounts) == (gpus is not None)
            said = {one["name"]: one.get("value") for one in container(pod)["env"]}
            assert said["COPPICE_WORKER_DEVICE"] == ("cuda" if gpus else "cpu")
        zero, _ = templates(objects)
        assert ("topologySpreadConstraints" in zero["spec"]) == (overlay == "ha")


def test_other_nodes_serve_nobody(objects: Objects) -> None:
    zero, other = templates(objects)
    assert {"ports", "startupProbe", "readinessProbe", "livenessProbe"} <= container(zero).keys()
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & container(other).keys()
    (service,) = [one for one in kind(objects, "Service") if one["metadata"]["name"] == "worker"]
    selector = service["spec"]["selector"].items()
    assert selector <= zero["metadata"]["labels"].items()
    assert not selector <= other["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"], "other nodes look for node 0 before it is ready"
    assert zero["spec"]["terminationGracePeriodSeconds"] == other["spec"]["terminationGracePeriodSeconds"]
    assert other["spec"]["automountServiceAccountToken"] is False
    assert container(other)["securityContext"] == container(zero)["securityContext"]


def test_each_pod_has_a_certificate_of_a_worker(objects: Objects) -> None:
    for pod, name in zip(templates(objects), ("worker-0", "worker-0-1"), strict=True):
        (tls,) = [volume["csi"] for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        identity = parse_identity(tls["volumeAttributes"]["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", name))
        assert (identity.role, identity.name) == (Role.WORKER, name)


def test_nodes_reach_each_other_and_nobody_else_does(objects: Objects) -> None:
    zero, other = templates(objects)
    policies = {one["metadata"]["name"]: one["spec"] for one in kind(objects, "NetworkPolicy")}
    shut = policies["coppice-nobody"]["podSelector"]["matchLabels"].items()
    assert shut <= other["metadata"]["labels"].items()
    nodes = policies["worker-nodes"]
    (wanted,) = nodes["podSelector"]["matchExpressions"]
    assert {pod["metadata"]["labels"][wanted["key"]] for pod in (zero, other)} == set(wanted["values"])
    assert nodes["ingress"] == [{"from": [{"podSelector": nodes["podSelector"]}]}]
    lets_in = [name for name, one in policies.items() if one["podSelector"].get("matchLabels", {}).get(
        "app.kubernetes.io/name") == "worker-node"]  # fmt: skip
    assert not lets_in


def test_keda_scales_groups(files: dict[str, str]) -> None:
    (scaled,) = built(files, "components/autoscaling")
    target = scaled["spec"]["scaleTargetRef"]
    base = built(files, "base")
    assert [one for one in base if (one["apiVersion"], one["kind"]) == (target["apiVersion"], target["kind"])]


def test_gpus_are_shared_out_evenly_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--gpus-per-worker 3 cannot be shared out evenly among --nodes-per-worker 2"):
        rendered(tmp_path, "--gpus-per-worker", "3", "--nodes-per-worker", "2")
    with pytest.raises(UsageError, match="--nodes-per-worker 0 is too few"):
        rendered(tmp_path, "--nodes-per-worker", "0")
