"""The objects of a stack: workloads, services, Redis, budgets, policies; and those that KEDA and Prometheus read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.tls.identity import ANY_GRPC_NAME, Role, grpc_name
from coppice_render.description import CACHE, PLANNERS, PLANNERS_HOST, SCHEDULER, SERVICES, WORKER, Service
from coppice_render.groups import API, KIND, node_policies, worker_groups
from coppice_render.options import RenderOptions
from coppice_render.pods import (
    SECRETS_FOLDER,
    TLS_FOLDER,
    UNPRIVILEGED,
    Object,
    certificate_volume,
    labels,
    named,
    pod,
    runs_as,
)

REDIS_IMAGE = "docker.io/library/redis:7.4.2-alpine"
_REDIS_USER, _REDIS_GROUP = 999, 1000  # of the image
_MONITOR_SECRET = "coppice-tls-monitor"


def cache(options: RenderOptions) -> list[Object]:
    """One pod, whose epoch outlives it."""
    claim: Object = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    if options.storage_class:
        claim["spec"]["storageClassName"] = options.storage_class
    spec = {
        "serviceName": "cache",
        "replicas": 1,
        "selector": {"matchLabels": labels("cache")},
        "template": pod(CACHE, options, Role.CACHE),
        "volumeClaimTemplates": [claim],
    }
    return [named("StatefulSet", "apps/v1", "cache", spec=spec), _service(CACHE)]


def scheduler(options: RenderOptions) -> list[Object]:
    """One pod: with one worker a second scheduler would only stand by, and never be ready. So the old one ends before
    the new one is started."""
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels("scheduler")},
        "template": pod(SCHEDULER, options, Role.SCHEDULER),
    }
    return [named("Deployment", "apps/v1", "scheduler", spec=spec), _service(SCHEDULER)]


def planners() -> list[Object]:
    """Where several schedulers reach each other's planners: one name for all pods, ready or not, and a policy that lets
    in schedulers alone."""
    service: Object = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels("scheduler"),
        "ports": [{"name": PLANNERS.name, "port": PLANNERS.number, "targetPort": PLANNERS.name}],
    }
    callers = [({"podSelector": {"matchLabels": labels(caller)}}, PLANNERS.number) for caller in PLANNERS.callers]
    policy = _allowed("scheduler", callers)
    policy["metadata"]["name"] = PLANNERS_HOST
    return [named("Service", "v1", PLANNERS_HOST, spec=service), policy]


def worker(options: RenderOptions) -> list[Object]:
    """Pods with names that stay, since a certificate is for one name. They start all at once."""
    if options.nodes_per_worker > 1:
        return [worker_groups(options), _service(WORKER, is_headless=True)]
    spec = {
        "serviceName": "worker",
        "replicas": options.workers,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels("worker")},
        "template": pod(WORKER, options, Role.WORKER),
    }
    return [named("StatefulSet", "apps/v1", "worker", spec=spec), _service(WORKER, is_headless=True)]


def _service(service: Service, *, is_headless: bool = False) -> Object:
    spec: Object = {
        "selector": labels(service.name),
        "ports": [{"name": port.name, "port": port.number, "targetPort": port.name} for port in service.ports],
    }
    if is_headless:
        # The scheduler reaches a worker by its own name before and after it says that it is ready.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    found = named("Service", "v1", service.name, spec=spec)
    found["metadata"]["labels"] = labels(service.name)
    return found


def redis(options: RenderOptions) -> list[Object]:
    """Registry, KV events and the cache's recovery log; all of it is rebuilt when it is gone, so nothing is kept."""
    command = [
        *("redis-server", "--save", "", "--appendonly", "no", "--maxmemory", "1gb", "--maxmemory-policy", "noeviction"),
        *("--aclfile", f"{SECRETS_FOLDER}/redis.acl"),
        *("--port", "0", "--tls-port", "6379", "--tls-auth-clients", "no"),
        *("--tls-cert-file", f"{TLS_FOLDER}/cert.pem", "--tls-key-file", f"{TLS_FOLDER}/key.pem"),
        *("--tls-ca-cert-file", f"{TLS_FOLDER}/ca.pem"),
    ]
    tls = certificate_volume(Role.MONITOR, "redis", options)
    attributes = tls["csi"]["volumeAttributes"]
    del attributes["csi.cert-manager.io/uri-sans"]  # it is nobody of ours, so its certificate opens nothing
    attributes |= {"csi.cert-manager.io/dns-names": "redis", "csi.cert-manager.io/fs-group": str(_REDIS_USER)}
    container = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "command": command,
        "ports": [{"name": "redis", "containerPort": 6379}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 10},
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1536Mi"}},
        "securityContext": UNPRIVILEGED,
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True},
        ],
    }
    secret = {"secretName": "coppice-secrets", "items": [{"key": "redis.acl", "path": "redis.acl"}]}
    template = {
        "metadata": {"labels": labels("redis")},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": runs_as(_REDIS_USER, _REDIS_GROUP),
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}, tls, {"name": "secrets", "secret": secret}],
        },
    }
    spec = {"replicas": 1, "selector": {"matchLabels": labels("redis")}, "template": template}
    ports = [{"name": "redis", "port": 6379, "targetPort": "redis"}]
    return [
        named("Deployment", "apps/v1", "redis", spec=spec),
        named("Service", "v1", "redis", spec={"selector": labels("redis"), "ports": ports}),
    ]


def disruption_budgets() -> list[Object]:
    """A node that is emptied takes one pod of each kind at a time."""
    return [
        named(
            "PodDisruptionBudget",
            "policy/v1",
            service.name,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": labels(service.name)}},
        )
        for service in SERVICES
    ]


def network_policies(options: RenderOptions) -> list[Object]:
    """Each port is open to those whom the description names. Ports of operators are open to nobody: `kubectl
    port-forward` reaches them."""
    found = [
        named(
            "NetworkPolicy",
            "networking.k8s.io/v1",
            "coppice-nobody",
            spec={
                "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "coppice"}},
                "policyTypes": ["Ingress"],
            },
        ),
        _allowed("redis", [({"podSelector": {"matchLabels": labels("cache")}}, 6379)]),
    ]
    for service in SERVICES:
        allowed: list[tuple[Object | None, int]] = []
        for port in service.ports:
            for caller in port.callers:
                if caller == "clients":
                    allowed.append((None, port.number))
                elif caller == "metrics":
                    space = {"kubernetes.io/metadata.name": options.monitoring_namespace}
                    allowed.append(({"namespaceSelector": {"matchLabels": space}}, port.number))
                elif caller != "operators":
                    allowed.append(({"podSelector": {"matchLabels": labels(caller)}}, port.number))
        found.append(_allowed(service.name, allowed))
    return found + (node_policies() if options.nodes_per_worker > 1 else [])


def _allowed(name: str, allowed: Sequence[tuple[Object | None, int]]) -> Object:
    """`allowed`: who, None for everybody, and the port."""
    ingress = [
        {**({} if who is None else {"from": [who]}), "ports": [{"protocol": "TCP", "port": number}]}
        for who, number in allowed
    ]
    spec = {"podSelector": {"matchLabels": labels(name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    return named("NetworkPolicy", "networking.k8s.io/v1", name, spec=spec)


def autoscaling(options: RenderOptions) -> list[Object]:
    """KEDA starts workers for each 64 requests that wait or run; what runs on one that is stopped ends or moves."""
    query = "sum(vllm:num_requests_waiting) + sum(vllm:num_requests_running)"
    trigger = {
        "type": "prometheus",
        "metadata": {"serverAddress": options.prometheus, "query": query, "threshold": "64"},
    }
    api, kind = (API, KIND) if options.nodes_per_worker > 1 else ("apps/v1", "StatefulSet")
    spec = {
        "scaleTargetRef": {"apiVersion": api, "kind": kind, "name": "worker"},
        "minReplicaCount": options.workers,
        "maxReplicaCount": options.workers_max,
        "pollingInterval": 15,
        "cooldownPeriod": 300,
        "triggers": [trigger],
    }
    return [named("ScaledObject", "keda.sh/v1alpha1", "worker", spec=spec)]


def monitors(options: RenderOptions) -> list[Object]:
    """A certificate for Prometheus, and where it scrapes: the ports that the description has for metrics."""
    certificate = {
        "secretName": _MONITOR_SECRET,
        "issuerRef": {"kind": "Issuer", "name": options.issuer},
        "uris": [f"coppice://{Role.MONITOR}/prometheus"],
        "dnsNames": [grpc_name(Role.MONITOR), ANY_GRPC_NAME],
        "usages": ["digital signature", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256},
    }
    found = [named("Certificate", "cert-manager.io/v1", "coppice-monitor", spec=certificate)]
    for service in SERVICES:
        endpoints = [
            {"port": port.name, "scheme": "https", "interval": "15s", "tlsConfig": _scrapes_as_monitor(service.name)}
            for port in service.ports
            if "metrics" in port.callers
        ]
        spec = {"selector": {"matchLabels": labels(service.name)}, "endpoints": endpoints}
        found.append(named("ServiceMonitor", "monitoring.coreos.com/v1", service.name, spec=spec))
    return found


def _scrapes_as_monitor(role: str) -> Object:
    return {
        "serverName": grpc_name(Role(role)),
        "ca": {"secret": {"name": _MONITOR_SECRET, "key": "ca.crt"}},
        "cert": {"secret": {"name": _MONITOR_SECRET, "key": "tls.crt"}},
        "keySecret": {"name": _MONITOR_SECRET, "key": "tls.key"},
    }


def spread() -> Object:
    """What `ha` adds to the pods of workers: they stand on different nodes and in different zones where they can."""
    constraint: dict[str, Any] = {
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels("worker")},
    }
    return {
        "topologySpreadConstraints": [
            {**constraint, "topologyKey": "kubernetes.io/hostname"},
            {**constraint, "topologyKey": "topology.kubernetes.io/zone"},
        ]
    }
