"""The cluster: how it is reached, and whether it has room for what is asked."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.errors import UnavailableError
from coppice_up.options import ray_head

CONNECT_S = 5.0
ATTEMPTS = 5
# What the head says of a fork that died: after it looked whether the fork runs, and between that look and the next.
_FORK_DIED = ("Starting Ray client server failed", "psutil.ZombieProcess", "psutil.NoSuchProcess")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one group of children asks of one node. `node`: the address of the only one that will do."""

    cpus: float
    gpus: int
    node: str = ""

    def resources(self) -> dict[str, float]:
        """As Ray writes it; no bundle is empty."""
        found = {"CPU": self.cpus, "GPU": float(self.gpus), **({f"node:{self.node}": 0.001} if self.node else {})}
        return {name: amount for name, amount in found.items() if amount} or {"CPU": 0.001}


@dataclass(frozen=True, slots=True)
class Node:
    """What a living node has in all."""

    address: str
    cpus: float
    gpus: float


def connect(on: str) -> Any:
    """Ray, connected to the cluster. Raises UnavailableError."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call after the end starts a cluster of its own here
    try:
        import ray
    except ModuleNotFoundError:
        raise UnavailableError("Ray is not installed", hint="pip install 'coppice[ray]'") from None
    head = ray_head(on)
    if head is None:
        where, address = "Ray", on
        hint = "is this machine in a cluster? `ray start --address HEAD:6379` puts it there; or set RAY_ADDRESS"
    else:
        where, address = f"Ray at {head}", f"ray://{head}"
        hint = "`ray start --head --ray-client-server-port 10001` listens there; is that port open to us?"
        try:
            socket.create_connection((head.host, head.port), timeout=CONNECT_S).close()
        except OSError as error:
            raise UnavailableError(f"no Ray answers at {head}: {error.strerror or error}", hint=hint) from None
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with warnings.catch_warnings(action="ignore"):  # errors say the same
                ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
            break
        except (ConnectionError, RuntimeError, ValueError) as error:
            # The head forks a server for each client while its other threads are in gRPC; now and then that fork dies.
            if not any(mark in str(error) for mark in _FORK_DIED) or attempt == ATTEMPTS:
                raise UnavailableError(f"cannot connect to {where}: {reason(error)}", hint=hint) from None
    return ray


def reason(error: Exception) -> str:
    """The line of an error of Ray's that says most: what was raised elsewhere."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line or "Exception:" in line]
    return (named or lines or [type(error).__name__])[-1]


def living_nodes(ray: Any) -> list[Node]:
    return [
        Node(each["NodeManagerAddress"], each["Resources"].get("CPU", 0.0), each["Resources"].get("GPU", 0.0))
        for each in ray.nodes()
        if each["Alive"]
    ]


def has_room(front: Bundle, worker: Bundle, num_workers: int, nodes: Sequence[Node]) -> bool:
    """Whether all bundles fit at once on nodes that nobody else uses."""

    def num_fitting(node: Node, cpus: float, gpus: float) -> int:
        found = [int(has // asked) for has, asked in ((cpus, worker.cpus), (gpus, worker.gpus)) if asked]
        return min(found, default=num_workers)

    def fits_with_front_on(chosen: Node) -> bool:
        if front.node not in ("", chosen.address) or chosen.cpus < front.cpus or chosen.gpus < front.gpus:
            return False
        num = sum(
            num_fitting(node, node.cpus - front.cpus, node.gpus - front.gpus)
            if node is chosen
            else num_fitting(node, node.cpus, node.gpus)
            for node in nodes
        )
        return num >= num_workers

    return any(fits_with_front_on(node) for node in nodes)


def what_is_asked(front: Bundle, worker: Bundle, num_workers: int, nodes_each: int = 1) -> str:
    """In words. `worker`: what a worker asks of each of its `nodes_each` nodes."""
    where = f" on {front.node}" if front.node else ""
    nodes = f" on each of {nodes_each} nodes" if nodes_each > 1 else ""
    workers = "1 worker" if num_workers == 1 else f"each of {num_workers} workers"
    return (
        f"{_amounts(front.cpus, front.gpus)}{where} for cache and scheduler, "
        f"{_amounts(worker.cpus, worker.gpus)}{nodes} for {workers}"
    )


def what_to_change(worker: Bundle, nodes_each: int) -> str:
    """For a user whose cluster is too small. The nodes of a worker share its GPUs; each has --threads of its own."""
    if nodes_each > 1 and not worker.gpus:
        return "give fewer --workers, --nodes-per-worker or --threads, or add nodes"
    more = ", more --nodes-per-worker (fewer GPUs of each)" if nodes_each > 1 else ""
    return f"give fewer --workers, --gpus-per-worker or --threads{more}, or add nodes"


def what_there_is(nodes: Sequence[Node], free: Mapping[str, float] | None = None) -> str:
    """`free`: as Ray says it of the cluster, where that matters."""
    listed = "; ".join(f"{node.address}: {_amounts(node.cpus, node.gpus)}" for node in nodes)
    text = f"{len(nodes)} node{'s' * (len(nodes) != 1)} ({listed})" if nodes else "no node"
    if free is None:
        return text
    return f"{text}, of which {_amounts(free.get('CPU', 0.0), free.get('GPU', 0.0))} is free"


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU, {gpus:g} GPU"
