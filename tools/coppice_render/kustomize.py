"""Files of a Kustomize tree: a base, overlays of it, and components for operators that not every cluster has.

base/                    workloads, services, network policies, disruption budgets
overlays/cpu, gpu        the base on one kind of node
overlays/ha              gpu, spread over nodes and zones, more workers, two schedulers that use each other's planners
components/monitoring    ServiceMonitors of the Prometheus Operator, a certificate for its scrapes
components/autoscaling   a ScaledObject of KEDA
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from coppice_render import groups, objects
from coppice_render.description import PLANNERS, SEVERAL_SCHEDULERS
from coppice_render.options import RenderOptions
from coppice_render.pods import Object

_HEAD = "# Made by `coppice render kubernetes`; render again rather than edit, or add an overlay of your own.\n"
_GPU = "nvidia.com/gpu"
_POD = "/spec/template/spec"
_SCHEDULER = {"kind": "Deployment", "name": "scheduler"}
# Two share the workers. Each of them has some, so one may go before the other one comes: what it had is the other's.
_SCHEDULERS: tuple[Object, ...] = (
    {"op": "replace", "path": "/spec/replicas", "value": 2},
    {
        "op": "replace",
        "path": "/spec/strategy",
        "value": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    },
    *(
        {"op": "add", "path": f"{_POD}/containers/0/env/-", "value": {"name": name, "value": value}}
        for name, value in SEVERAL_SCHEDULERS.items()
    ),
    {
        "op": "add",
        "path": f"{_POD}/containers/0/ports/-",
        "value": {"name": PLANNERS.name, "containerPort": PLANNERS.number},
    },
)


def _worker(options: RenderOptions) -> tuple[str, list[str]]:
    """Kind of the workers' workload, and where their pods are in it: those of node 0 first."""
    if options.nodes_per_worker > 1:
        return groups.KIND, [groups.LEADER, groups.OTHERS]
    return "StatefulSet", [_POD]


def files(options: RenderOptions) -> dict[str, str]:
    """Text of each file by its path. Raises UsageError."""
    options.check()
    found: dict[str, str] = {}
    base = {
        "cache.yaml": objects.cache(options),
        "scheduler.yaml": objects.scheduler(options),
        "worker.yaml": objects.worker(options),
        "redis.yaml": objects.redis(options),
        "network.yaml": objects.network_policies(options),
        "disruption.yaml": objects.disruption_budgets(),
    }
    for name, listed in base.items():
        found[f"base/{name}"] = _written(*listed)
    found["base/kustomization.yaml"] = _kustomization(namespace=options.namespace, resources=sorted(base))
    kind, pods = _worker(options)
    on_gpus = [*_device_patches(options, "cuda"), *(patch for at in pods for patch in _gpu_patches(options, at))]
    found["overlays/cpu/kustomization.yaml"] = _overlay(["../../base"], kind, _device_patches(options, "cpu"))
    found["overlays/gpu/kustomization.yaml"] = _overlay(["../../base"], kind, on_gpus)
    found["overlays/ha/planners.yaml"] = _written(*objects.planners())
    found["overlays/ha/kustomization.yaml"] = _overlay(
        ["../gpu", "planners.yaml"],
        kind,
        _ha_patches(options, pods[0]),
        _SCHEDULERS,
        namespace=options.namespace,
    )
    for name, listed in (("monitoring", objects.monitors(options)), ("autoscaling", objects.autoscaling(options))):
        found[f"components/{name}/{name}.yaml"] = _written(*listed)
        found[f"components/{name}/kustomization.yaml"] = _kustomization("Component", resources=[f"{name}.yaml"])
    return found


def _device_patches(options: RenderOptions, device: str) -> list[Object]:
    """Of the variable, where the base has it."""
    workload = objects.worker(options)[0]
    found: list[Object] = []
    for at in _worker(options)[1]:
        template: Any = workload
        for part in at.split("/")[1:]:
            template = template[part]
        names = [each["name"] for each in template["containers"][0]["env"]]
        path = f"{at}/containers/0/env/{names.index('COPPICE_WORKER_DEVICE')}/value"
        found.append({"op": "replace", "path": path, "value": device})
    return found


def _gpu_patches(options: RenderOptions, at: str) -> list[Object]:
    """Of the pods at this path."""
    num_gpus = options.gpus_per_worker // options.nodes_per_worker
    limits = f"{at}/containers/0/resources/limits/{_GPU.replace('/', '~1')}"
    found: list[Object] = [
        {"op": "add", "path": limits, "value": str(num_gpus)},
        {"op": "add", "path": f"{at}/tolerations", "value": [{"key": _GPU, "operator": "Exists"}]},
    ]
    if options.gpus_per_worker > 1 and options.nodes_per_worker == 1:
        rank = {"name": "COPPICE_WORKER_TENSOR_PARALLEL", "value": str(options.gpus_per_worker)}
        found.append({"op": "add", "path": f"{at}/containers/0/env/-", "value": rank})
    if num_gpus > 1:  # their ranks meet in shared memory
        shared: Any = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
        found += [
            {"op": "add", "path": f"{at}/volumes/-", "value": shared},
            {
                "op": "add",
                "path": f"{at}/containers/0/volumeMounts/-",
                "value": {"name": "shm", "mountPath": "/dev/shm"},  # nosec B108: its own volume
            },
        ]
    return found


def _ha_patches(options: RenderOptions, at: str) -> list[Object]:
    spread = [{"op": "add", "path": f"{at}/{key}", "value": value} for key, value in objects.spread().items()]
    return [{"op": "replace", "path": "/spec/replicas", "value": max(2, options.workers)}, *spread]


def _overlay(
    resources: list[str], kind: str, of_worker: list[Object], of_scheduler: Sequence[Object] = (), **parts: Any
) -> str:
    """`kind`: of the workers' workload."""
    patches = [({"kind": kind, "name": "worker"}, of_worker), (_SCHEDULER, list(of_scheduler))]
    texts = [(target, yaml.safe_dump(patch, sort_keys=False)) for target, patch in patches if patch]
    patched = [{"target": target, "patch": text} for target, text in texts]
    return _kustomization(**parts, resources=resources, patches=patched)


def _kustomization(kind: str = "Kustomization", **parts: Any) -> str:
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    return _written({"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind, **parts})


class _Dumper(yaml.SafeDumper):
    """Lists stand under their key, texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _written(*listed: Object) -> str:
    return _HEAD + "---\n".join(yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=120) for each in listed)
