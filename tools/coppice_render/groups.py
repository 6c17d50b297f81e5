"""A worker on several nodes of a cluster: a LeaderWorkerSet, whose groups are one worker each.

    worker-0 (node 0: the worker that everybody knows) ◄── worker-0-1, worker-0-2, ... (its other nodes)
    worker-1                                           ◄── worker-1-1, ...

The pods of a group meet at LWS_LEADER_ADDRESS, which the operator sets in each container as it does LWS_GROUP_SIZE and
LWS_WORKER_INDEX, before our own variables. A node that ends is started again by its kubelet, and all of the group with
it, since a worker lives and dies as a whole; so the operator recreates nothing.
"""

from __future__ import annotations

import copy

from coppice.tls.identity import Role
from coppice_render.description import WORKER
from coppice_render.options import RenderOptions
from coppice_render.pods import Object, labels, named, pod

KIND, API = "LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1"
OTHER_NODES = "worker-node"  # name of the pods that are not node 0
MEETING_PORT = 29500
LEADER, OTHERS = "/spec/leaderWorkerTemplate/leaderTemplate/spec", "/spec/leaderWorkerTemplate/workerTemplate/spec"


def worker_groups(options: RenderOptions) -> Object:
    """Pods of other nodes serve nobody: they have no ports, and nothing to be probed. Their process ends when
    anything is wrong."""
    leader = pod(WORKER, options, Role.WORKER)
    container = leader["spec"]["containers"][0]
    container["env"] += _meeting(options)
    other = copy.deepcopy(leader)
    other["metadata"]["labels"] = labels(OTHER_NODES)
    for part in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        del other["spec"]["containers"][0][part]
    container["ports"].append({"name": "nodes", "containerPort": MEETING_PORT})
    spec = {
        "replicas": options.workers,
        "startupPolicy": "LeaderCreated",  # node 0 is ready when the others are there
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1}},
        "leaderWorkerTemplate": {
            "size": options.nodes_per_worker,
            "restartPolicy": "None",
            "leaderTemplate": leader,
            "workerTemplate": other,
        },
    }
    return named(KIND, API, "worker", spec=spec)


def node_policies() -> list[Object]:
    """Nodes of workers reach each other on all ports: gloo and NCCL choose theirs. Nobody else reaches those that are
    not node 0."""
    peers = {"key": "app.kubernetes.io/name", "operator": "In", "values": ["worker", OTHER_NODES]}
    selector = {"matchExpressions": [peers]}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": selector}]}]}
    return [named("NetworkPolicy", "networking.k8s.io/v1", "worker-nodes", spec=spec)]


def _meeting(options: RenderOptions) -> list[Object]:
    said = {
        "COPPICE_WORKER_TENSOR_PARALLEL": str(options.gpus_per_worker),
        "COPPICE_WORKER_NNODES": "$(LWS_GROUP_SIZE)",
        "COPPICE_WORKER_NODE_RANK": "$(LWS_WORKER_INDEX)",
        "COPPICE_WORKER_DIST_INIT_ADDR": f"$(LWS_LEADER_ADDRESS):{MEETING_PORT}",
    }
    return [{"name": name, "value": value} for name, value in said.items()]
