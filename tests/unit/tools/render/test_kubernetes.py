"""Manifests for Kubernetes: what they name is there, services read what they set, nothing is open that nobody calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coppice.errors import UsageError
from coppice.settings import Settings, parse_settings, variable_of
from coppice.tls.identity import Role, parse_identity
from coppice_cache.edge.settings import CacheSettings
from coppice_cli.app import app
from coppice_render.description import DISK, PLANNERS_HOST, SERVICES, TLS, Service
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_worker.edge.settings import WorkerSettings
from tests.fakes.tools.kustomize import built

ROOT = Path(__file__).resolve().parents[4]
SETTINGS: dict[str, type[Settings]] = {"cache": CacheSettings, "scheduler": ServiceSettings, "worker": WorkerSettings}
OVERLAYS = ("cpu", "gpu", "ha")
Objects = list[dict[str, Any]]


def rendered(folder: Path, *words: str) -> dict[str, str]:
    done = CliRunner().invoke(app, ["render", "kubernetes", "--out", str(folder / "k8s"), *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    root = folder / "k8s"
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.yaml")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return rendered(tmp_path_factory.mktemp("render"), "--workers", "3", "--gpus-per-worker", "2")


@pytest.fixture(params=OVERLAYS)
def objects(files: dict[str, str], request: pytest.FixtureRequest) -> Objects:
    return built(files, f"overlays/{request.param}")


def kind(objects: Objects, name: str) -> Objects:
    return [one for one in objects if one["kind"] == name]


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """Templates by the name of their workload."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment")
    }


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(pod: dict[str, Any], pod_name: str) -> dict[str, str]:
    """As a kubelet gives it to the process: references to variables before are replaced."""
    found: dict[str, str] = {}
    for one in container(pod)["env"]:
        if "valueFrom" in one:
            assert one["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            found[one["name"]] = pod_name
        else:
            found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], one["value"])
    return found


def test_an_overlay_has_all_parts_once(objects: Objects) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))
    assert set(pods(objects)) == {"cache", "scheduler", "worker", "redis"}
    assert {one["metadata"]["namespace"] for one in objects} == {"coppice"}
    assert [one["spec"]["replicas"] for one in kind(objects, "StatefulSet")] == [1, 3]


@pytest.mark.parametrize("name", SETTINGS)
def test_services_take_the_variables_that_are_set(objects: Objects, name: str, tmp_path: Path) -> None:
    (service,) = [one for one in SERVICES if one.name == name]
    for secret in service.secrets:
        (tmp_path / secret).write_text("ab" * 32)
    said = environment(pods(objects)[name], f"{name}-0")
    said = {variable: value.replace("/etc/coppice/secrets", str(tmp_path)) for variable, value in said.items()}
    settings = parse_settings(SETTINGS[name], [], said, name)
    assert settings.model_dump()["tls_cert"] == "/etc/coppice/tls/cert.pem"
    if isinstance(settings, WorkerSettings):
        assert (settings.worker_id, settings.advertise) == ("worker-0", "worker-0.worker:7082")


def test_a_disk_tier_has_a_volume_of_its_own(tmp_path: Path) -> None:
    objects = built(rendered(tmp_path, "--host-memory-mib", "64", "--disk-mib", "512"), "overlays/cpu")
    worker = pods(objects)["worker"]
    said = environment(worker, "worker-0")
    settings = parse_settings(WorkerSettings, [], said, "worker")
    assert (settings.disk_folder, settings.disk_mib) == (DISK, 512)
    assert {"name": "disk", "mountPath": DISK} in container(worker)["volumeMounts"]
    (volume,) = [one for one in worker["spec"]["volumes"] if one["name"] == "disk"]
    assert volume["emptyDir"] == {"sizeLimit": "1024Mi"}, "what a container had before is taken away beside its work"
    assert container(worker)["resources"]["requests"]["ephemeral-storage"] == "1024Mi"
    test_what_is_mounted_is_there_and_nothing_else(objects)


def test_overlays_choose_the_device(files: dict[str, str]) -> None:
    for overlay, device, gpus in (("cpu", "cpu", None), ("gpu", "cuda", "2"), ("ha", "cuda", "2")):
        worker = pods(built(files, f"overlays/{overlay}"))["worker"]
        said = environment(worker, "worker-0")
        assert said["COPPICE_WORKER_DEVICE"] == device
        assert said.get("COPPICE_WORKER_TENSOR_PARALLEL") == gpus
        assert container(worker)["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert ("topologySpreadConstraints" in worker["spec"]) == (overlay == "ha")


def test_two_schedulers_are_updated_one_after_the_other(files: dict[str, str]) -> None:
    specs = {
        overlay: next(one["spec"] for one in built(dict(files), f"overlays/{overlay}") if is_scheduler(one))
        for overlay in ("gpu", "ha")
    }
    assert (specs["gpu"]["replicas"], specs["gpu"]["strategy"]) == (1, {"type": "Recreate"})
    assert specs["ha"]["replicas"] == 2
    assert specs["ha"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_two_schedulers_reach_each_others_planners(files: dict[str, str]) -> None:
    objects = built(dict(files), "overlays/ha")
    said = environment(pods(objects)["scheduler"], "scheduler-0")
    settings = parse_settings(ServiceSettings, [], said, "scheduler")
    settings.check_listening()
    (peer,) = settings.planner_peers
    (service,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Service", peer.split(":")[0])]
    assert service["spec"]["clusterIP"] == "None", "its name stands for all pods"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["ports"] == [{"name": "planners", "port": settings.planner_port, "targetPort": "planners"}]
    assert settings.planners == 1, "the others listen on ports above it"
    alone = environment(pods(built(dict(files), "overlays/gpu"))["scheduler"], "scheduler-0")
    assert not [name for name in alone if "PLANNER" in name]


def is_scheduler(one: dict[str, Any]) -> bool:
    return (one["kind"], one["metadata"]["name"]) == ("Deployment", "scheduler")


def test_what_is_mounted_is_there_and_nothing_else(objects: Objects) -> None:
    claims = {
        one["metadata"]["name"]: {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    for name, pod in pods(objects).items():
        mounted = [mount["name"] for mount in container(pod)["volumeMounts"]]
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert sorted(mounted) == sorted([*volumes, *claims[name]]), name
        folders = tuple(mount["mountPath"] for mount in container(pod)["volumeMounts"])
        for variable, value in environment(pod, name).items() if name != "redis" else ():
            if value.startswith("/"):
                assert value.startswith(folders), f"{variable} of {name} names {value}, which nothing is mounted at"


def test_nobody_has_privileges(objects: Objects) -> None:
    for name, pod in pods(objects).items():
        spec, own = pod["spec"], container(pod)["securityContext"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container(pod)["resources"]["limits"]
    for dockerfile in (ROOT / "deploy" / "docker").glob("*.Dockerfile"):
        (user,) = re.findall(r"useradd --uid (\d+)", dockerfile.read_text())
        assert pods(objects)["cache"]["spec"]["securityContext"]["runAsUser"] == int(user)


def test_certificates_are_for_the_role_and_the_name_of_each_pod(objects: Objects) -> None:
    for name, pod in pods(objects).items():
        (tls,) = [volume["csi"] for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        assert tls["driver"] == "csi.cert-manager.io"
        said = {key.removeprefix("csi.cert-manager.io/"): value for key, value in tls["volumeAttributes"].items()}
        assert (said["certificate-file"], said["privatekey-file"], said["ca-file"]) == ("cert.pem", "key.pem", "ca.pem")
        if name == "redis":
            assert ("uri-sans" in said, said["dns-names"]) == (False, "redis"), "it is nobody of ours"
            continue
        identity = parse_identity(said["uri-sans"].replace("${POD_NAME}", f"{name}-0"))
        assert (identity.role, identity.name) == (Role(name), f"{name}-0")
        assert said["dns-names"].split(",") == [f"{name}.coppice.internal", "coppice.internal"]


def test_ports_of_services_are_those_of_their_pods(objects: Objects) -> None:
    named = {one["metadata"]["name"]: one["spec"] for one in kind(objects, "Service")}
    assert named.keys() - {PLANNERS_HOST} == pods(objects).keys()
    for name, pod in pods(objects).items():
        chosen = [spec for spec in named.values() if spec["selector"].items() <= pod["metadata"]["labels"].items()]
        assert named[name] in chosen
        of_pod = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        assert {port["targetPort"]: port["port"] for spec in chosen for port in spec["ports"]} == of_pod
    for one in kind(objects, "StatefulSet"):
        assert one["spec"]["serviceName"] in named


@pytest.mark.parametrize("name", SETTINGS)
def test_the_described_ports_are_those_that_the_service_listens_on(name: str) -> None:
    (service,) = [one for one in SERVICES if one.name == name]
    fields = SETTINGS[name].model_fields
    served = {field.default for field_name, field in fields.items() if field_name.endswith("port")}
    served |= {int(value) for variable, value in service.environment.items() if variable.endswith("_PORT")}
    assert {port.number for port in service.ports} == {number for number in served if number}


def test_who_may_reach_whom(objects: Objects) -> None:
    """Every pod is shut but for what its own policy lets in; peers and ports exist."""
    policies = {one["metadata"]["name"]: one["spec"] for one in kind(objects, "NetworkPolicy")}
    shut = policies.pop("coppice-nobody")
    assert shut["policyTypes"] == ["Ingress"]
    assert "ingress" not in shut
    open_to: set[tuple[str, str, int]] = set()
    for name, pod in pods(objects).items():
        labels = pod["metadata"]["labels"]
        assert shut["podSelector"]["matchLabels"].items() <= labels.items()
        ports = {port["containerPort"] for port in container(pod)["ports"]}
        chosen_by = [one for one in policies.values() if one["podSelector"]["matchLabels"].items() <= labels.items()]
        assert policies[name] in chosen_by
        for rule in [rule for policy in chosen_by for rule in policy["ingress"]]:
            ((port,), callers) = (rule["ports"], rule.get("from", [{}]))
            assert port["port"] in ports
            for caller in callers:
                chosen = caller.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name")
                open_to.add((chosen or next(iter(caller), "everybody"), name, port["port"]))
    several = {("scheduler", "scheduler", 7083)} if PLANNERS_HOST in policies else set()
    assert open_to == several | {
        ("everybody", "scheduler", 8000),
        ("everybody", "scheduler", 7070),
        ("namespaceSelector", "scheduler", 8073),
        ("namespaceSelector", "cache", 8071),
        ("namespaceSelector", "worker", 8072),
        ("scheduler", "cache", 7081),
        ("worker", "cache", 7081),
        ("scheduler", "worker", 7082),
        ("cache", "redis", 6379),
    }


def test_pods_have_time_to_drain(objects: Objects) -> None:
    for name in ("worker", "scheduler"):
        drain_s = SETTINGS[name].model_fields["drain_s"].default
        assert pods(objects)[name]["spec"]["terminationGracePeriodSeconds"] > drain_s + 5
        assert f"COPPICE_{name.upper()}_DRAIN_S" not in environment(pods(objects)[name], name)
    assert pods(objects)["scheduler"]["spec"]["containers"][0]["lifecycle"]
    (scheduler,) = [one for one in kind(objects, "Deployment") if one["metadata"]["name"] == "scheduler"]
    is_alone = scheduler["spec"]["replicas"] == 1
    assert scheduler["spec"]["strategy"]["type"] == ("Recreate" if is_alone else "RollingUpdate")


def test_components_name_what_is_there(files: dict[str, str]) -> None:
    base = built(files, "base")
    named = {one["metadata"]["name"]: one for one in kind(base, "Service")}
    monitors = built(files, "components/monitoring")
    (certificate,) = kind(monitors, "Certificate")
    assert parse_identity(certificate["spec"]["uris"][0]).role is Role.MONITOR
    for one in kind(monitors, "ServiceMonitor"):
        service = named[one["metadata"]["name"]]
        assert one["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        (endpoint,) = one["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["tlsConfig"]["keySecret"]["name"] == certificate["spec"]["secretName"]
    (scaled,) = built(files, "components/autoscaling")
    target = scaled["spec"]["scaleTargetRef"]
    assert [one for one in base if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
    assert scaled["spec"]["minReplicaCount"] == 3
    metrics = re.findall(r"vllm:\w+", scaled["spec"]["triggers"][0]["metadata"]["query"])
    source = (ROOT / "services/scheduler/coppice_scheduler/edge/planner/metrics.py").read_text()
    assert metrics
    assert all(f'"{name}"' in source for name in metrics)


# ---- one description for both ----


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_each_setting_is_set_or_said_why_not(service: Service) -> None:
    cls = SETTINGS[service.name]
    by_variable = {variable_of(cls, name): name for name in cls.model_fields}
    said = {
        variable.removesuffix("_FILE") if variable.endswith(("KEY_FILE", "PASSWORD_FILE")) else variable
        for variable in service.environment
    }
    assert said <= by_variable.keys()
    fields = {by_variable[variable] for variable in said}
    absent = service.default_settings.keys()
    assert absent <= cls.model_fields.keys()
    assert not fields & absent
    missing = cls.model_fields.keys() - fields - absent
    assert not missing, f"set {missing} in tools/coppice_render/description.py, or say why it is not"


OF_THE_CONSOLE = ("_REQUESTS_URL", "_REST_URL", "_CORS_ORIGINS", "_CONSOLE_ORIGINS")  # by ports that compose publishes


@pytest.mark.parametrize(
    ("described", "name"),
    [("cache", "cache"), ("scheduler", "scheduler"), ("worker", "worker-cpu"), ("worker", "worker-gpu")],
)
def test_the_compose_file_sets_the_same(described: str, name: str) -> None:
    (service,) = [one for one in SERVICES if one.name == described]
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]
    places = {
        "tls": "/etc/coppice/tls",
        "secrets": "/run/secrets",
        "tenants": "/etc/coppice/tenants",
        "model": "/opt/coppice/model",
        "model_name": "${COPPICE_MODEL_NAME:-coppice-demo}",
        "worker": name,
        "worker_host": name,
        "device": "cuda" if name == "worker-gpu" else "cpu",
        "host_memory_mib": "${COPPICE_HOST_MEMORY_MIB:-0}",
        "disk_folder": DISK,
        "disk_mib": "${COPPICE_DISK_MIB:-0}",
        "metrics_host": "0.0.0.0",
        "otlp": "https://otel-collector:4317",
    }
    expected = {variable: value.format(**places) for variable, value in {**TLS, **service.environment}.items()}
    found = {key: str(value) for key, value in composed["environment"].items()}
    assert {key: value for key, value in found.items() if not key.endswith(OF_THE_CONSOLE)} == expected
    assert composed["pids_limit"] == service.pids_max
    assert set(composed.get("secrets", [])) == set(service.secrets)
    mounted = [volume.rsplit(":", 2)[-2 if volume.endswith(":ro") else -1] for volume in composed["volumes"]]
    assert ("/opt/coppice/model" in mounted) == service.reads_model
    assert ("/etc/coppice/tenants" in mounted) == service.reads_tenants
    assert ("/var/lib/coppice" in mounted) == bool(service.state)
    assert (DISK in mounted) == bool(service.disk)


# ---- the command ----


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    rendered(tmp_path)
    (tmp_path / "k8s" / "base" / "worker.yaml").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        rendered(tmp_path)
    assert (tmp_path / "k8s" / "base" / "worker.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--namespace", "Coppice"), "--namespace 'Coppice'"),
        (("--workers", "0"), "--workers 0"),
        (("--gpus-per-worker", "-1"), "--gpus-per-worker -1"),
        (("--workers", "9"), "--workers-max 4 is less"),
        (("--disk-mib", "-1"), "--disk-mib -1"),
        (("--disk-mib", "9"), "--disk-mib without --host-memory-mib"),
        (("--disk-mib", "9", "--host-memory-mib", "9", "--gpus-per-worker", "2"), "2 GPUs share has no disk tier"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rendered(tmp_path, *words)
    assert not (tmp_path / "k8s").exists()


def test_images_have_the_registry_and_the_tag(tmp_path: Path) -> None:
    made = rendered(tmp_path, "--registry", "registry.example.com/team/", "--tag", "7")
    images = {container(pod)["image"] for name, pod in pods(built(made, "base")).items() if name != "redis"}
    assert images == {f"registry.example.com/team/coppice-{name}:7" for name in SETTINGS}
