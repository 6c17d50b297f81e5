"""Pods of our services: one container, no privileges, files by reference, probes."""

from __future__ import annotations

from typing import Any

from coppice.tls.identity import ANY_GRPC_NAME, Role, grpc_name
from coppice_render.description import ANY_ADDRESS, DISK, GRACE_S, STATE, USER, Service, filled
from coppice_render.options import RenderOptions

Object = dict[str, Any]
TLS_FOLDER, SECRETS_FOLDER, TENANTS_FOLDER = "/etc/coppice/tls", "/etc/coppice/secrets", "/etc/coppice/tenants"
MODEL_FOLDER = "/opt/coppice/model"
POD_NAME = "COPPICE_POD_NAME"
# A worker advertises the name that its StatefulSet gives it.
_DISKS_AT_ONCE = 2  # until what a container before had is taken away
_OF_POD = f"$({POD_NAME})"

UNPRIVILEGED: Object = {  # of a container
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def runs_as(user: int, group: int) -> Object:
    """Of a pod, whose volumes are this user's."""
    seccomp = {"type": "RuntimeDefault"}
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": group, "fsGroup": user, "seccompProfile": seccomp}


def labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "coppice", "app.kubernetes.io/name": name}


def named(kind: str, api: str, name: str, **parts: Any) -> Object:
    """An object, with our labels."""
    metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": "coppice"}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}


def pod(service: Service, options: RenderOptions, role: Role) -> Object:
    """Template of the pods of a service."""
    probes = _PROBES[service.name]
    container: Object = {
        "name": service.name,
        "image": options.image(service.name),
        "env": _environment(service, options),
        "ports": [{"name": port.name, "containerPort": port.number} for port in service.ports],
        **probes,
        "resources": _resources(service, options),
        "securityContext": UNPRIVILEGED,
        "volumeMounts": _mounts(service, options),
    }
    if service.name == "scheduler":
        # Who routes to it hears later than it that it ends.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    return {
        "metadata": {"labels": labels(service.name)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_S + 5,
            "securityContext": runs_as(USER, USER),
            "containers": [container],
            "volumes": _volumes(service, options, role),
        },
    }


def _environment(service: Service, options: RenderOptions) -> list[Object]:
    places = {
        "tls": TLS_FOLDER,
        "secrets": SECRETS_FOLDER,
        "tenants": TENANTS_FOLDER,
        "model": MODEL_FOLDER,
        "model_name": options.model_name,
        "worker": _OF_POD,
        "worker_host": f"{_OF_POD}.worker",
        "device": "cpu",
        "host_memory_mib": str(options.host_memory_mib),
        "disk_folder": DISK if options.disk_mib else "",
        "disk_mib": str(options.disk_mib),
        "metrics_host": ANY_ADDRESS,
        "otlp": options.otlp_endpoint,
    }
    found: list[Object] = []
    if service.name == "worker":  # before those that name it
        found.append({"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    return found + [{"name": name, "value": value} for name, value in filled(service, places).items()]


def _mounts(service: Service, options: RenderOptions) -> list[Object]:
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": "/tmp"},  # nosec B108: its own volume
        {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True},
    ]
    if service.secrets:
        mounts.append({"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True})
    if service.reads_tenants:
        mounts.append({"name": "tenants", "mountPath": TENANTS_FOLDER, "readOnly": True})
    if service.reads_model:
        mounts.append({"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True})
    if service.state:
        mounts.append({"name": "state", "mountPath": STATE})
    if service.disk and options.disk_mib:
        mounts.append({"name": "disk", "mountPath": DISK})
    return mounts


def _volumes(service: Service, options: RenderOptions, role: Role) -> list[Object]:
    """But for the cache's state, which is a claim of its own."""
    volumes: list[Object] = [{"name": "tmp", "emptyDir": {}}, certificate_volume(role, "${POD_NAME}", options)]
    if service.secrets:
        items = [{"key": name, "path": name} for name in service.secrets]
        volumes.append({"name": "secrets", "secret": {"secretName": "coppice-secrets", "items": items}})
    if service.reads_tenants:
        volumes.append({"name": "tenants", "secret": {"secretName": "coppice-tenants"}})
    if service.reads_model:
        claim = {"claimName": options.model_claim, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    if service.name == "worker":
        volumes.append({"name": "state", "emptyDir": {}})
    if service.disk and options.disk_mib:
        volumes.append({"name": "disk", "emptyDir": {"sizeLimit": f"{_DISKS_AT_ONCE * options.disk_mib}Mi"}})
    return volumes


def certificate_volume(role: Role, name: str, options: RenderOptions) -> Object:
    """Each pod gets a certificate in its own name from cert-manager's CSI driver, which renews it in place."""
    attributes = {
        "issuer-kind": "Issuer",
        "issuer-name": options.issuer,
        "uri-sans": f"coppice://{role}/{name}",
        "dns-names": f"{grpc_name(role)},{ANY_GRPC_NAME}",
        "key-usages": "digital signature,server auth,client auth",
        "duration": "2160h",
        "certificate-file": "cert.pem",
        "privatekey-file": "key.pem",
        "ca-file": "ca.pem",
        "fs-group": str(USER),
    }
    of_driver = {f"csi.cert-manager.io/{key}": value for key, value in attributes.items()}
    return {"name": "tls", "csi": {"driver": "csi.cert-manager.io", "readOnly": True, "volumeAttributes": of_driver}}


def _serves(port: int, period_s: int, failures: int) -> Object:
    """By our own command: the ports speak TLS and want to know who asks, which a kubelet cannot tell."""
    command = ["coppice", "health", f"127.0.0.1:{port}"]
    return {
        "exec": {"command": command},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _listens(port: str) -> Object:
    """What waits for another service is not started again for that."""
    return {"tcpSocket": {"port": port}, "periodSeconds": 10, "failureThreshold": 3}


_PROBES: dict[str, Object] = {
    "cache": {
        "startupProbe": _serves(7071, 2, 60),
        "readinessProbe": _serves(7071, 10, 3),
        "livenessProbe": _listens("grpc"),
    },
    "worker": {  # a checkpoint takes minutes to load
        "startupProbe": _serves(7072, 5, 240),
        "readinessProbe": _serves(7072, 10, 3),
        "livenessProbe": _listens("grpc"),
    },
    "scheduler": {
        "startupProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10, "failureThreshold": 6},
    },
}


def _resources(service: Service, options: RenderOptions) -> Object:
    resources = _RESOURCES[service.name]
    if not (service.disk and options.disk_mib):
        return resources
    room = {"ephemeral-storage": f"{_DISKS_AT_ONCE * options.disk_mib}Mi"}
    return {**resources, "requests": {**resources["requests"], **room}}


_RESOURCES: dict[str, Object] = {
    "cache": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
    "worker": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}},
    "scheduler": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
}
