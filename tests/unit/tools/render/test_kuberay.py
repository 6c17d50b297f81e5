"""The manifest for KubeRay: its command is one that `coppice up` takes, and what that names is there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from coppice_cli import app as cli
from coppice_up.options import UpOptions

MANIFEST = Path(__file__).resolve().parents[4] / "deploy" / "kuberay" / "rayjob.yaml"


@pytest.fixture
def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.fixture
def options(objects: dict[str, Any]) -> UpOptions:
    program, command, *words = shlex.split(objects["RayJob"]["spec"]["entrypoint"])
    assert (program, command) == ("coppice", "up")
    up = typer.main.get_command(cli.app).commands["up"]  # type: ignore[attr-defined]
    given = up.make_context("up", words).params
    paths = {name: Path(given[name]) for name in ("tenants", "certs")}
    return UpOptions(**{**given, **paths})


def groups(objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"], workers


def mounted(group: dict[str, Any]) -> list[str]:
    (container,) = group["template"]["spec"]["containers"]
    names = [volume["name"] for volume in group["template"]["spec"]["volumes"]]
    assert sorted(names) == sorted(mount["name"] for mount in container["volumeMounts"])
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_cluster_has_what_the_command_asks_for(objects: dict[str, Any], options: UpOptions) -> None:
    head, workers = groups(objects)
    (container,) = workers["template"]["spec"]["containers"]
    assert options.on == "auto"
    assert workers["replicas"] > options.workers, "one node is spare"
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == options.gpus == 1
    assert workers["template"]["metadata"]["labels"] == head["template"]["metadata"]["labels"]


def test_what_the_command_reads_is_mounted(objects: dict[str, Any], options: UpOptions) -> None:
    head, workers = (mounted(group) for group in groups(objects))
    assert {options.model, str(options.certs)} <= set(head) & set(workers)
    assert options.tenants is not None
    assert str(options.tenants.parent) in head


def test_clients_reach_the_ports_of_the_command(objects: dict[str, Any], options: UpOptions) -> None:
    head, _ = groups(objects)
    (container,) = head["template"]["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (named["rest"], named["grpc"]) == (options.port, options.grpc_port)
    service, policy = objects["Service"]["spec"], objects["NetworkPolicy"]["spec"]
    assert {port["port"] for port in service["ports"]} == {options.port, options.grpc_port}
    labels = head["template"]["metadata"]["labels"]
    assert service["selector"]["app.kubernetes.io/name"] == labels["app.kubernetes.io/name"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    _, to_clients = policy["ingress"]
    assert {port["port"] for port in to_clients["ports"]} == {options.port, options.grpc_port}
    assert "from" not in to_clients
