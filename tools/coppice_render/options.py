"""What an operator says of a stack on Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coppice.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """`model_claim`, `issuer` and `storage_class` are names of objects in the cluster; an empty class is its default.
    `workers_max`: that KEDA may start. GPUs of a worker are shared out evenly among its nodes. Without `otlp_endpoint`
    no spans are sent."""

    namespace: str
    registry: str
    tag: str
    model_name: str
    model_claim: str
    workers: int
    workers_max: int
    gpus_per_worker: int
    nodes_per_worker: int = 1
    host_memory_mib: int
    disk_mib: int = 0
    issuer: str
    storage_class: str
    otlp_endpoint: str
    prometheus: str
    monitoring_namespace: str

    def check(self) -> None:
        """Raises UsageError."""
        for flag, name in (
            ("--namespace", self.namespace),
            ("--monitoring-namespace", self.monitoring_namespace),
            ("--issuer", self.issuer),
        ):
            if not _LABEL.match(name):
                raise UsageError(f"{flag} {name!r} is no name that Kubernetes takes", hint="a-z, 0-9 and dashes")
        for flag, number in (
            ("--workers", self.workers),
            ("--gpus-per-worker", self.gpus_per_worker),
            ("--nodes-per-worker", self.nodes_per_worker),
        ):
            if number < 1:
                raise UsageError(f"{flag} {number} is too few", hint="give at least 1")
        if self.disk_mib < 0:
            raise UsageError(f"--disk-mib {self.disk_mib} is out of range", hint="0 for no disk tier")
        if self.gpus_per_worker % self.nodes_per_worker:
            raise UsageError(
                f"--gpus-per-worker {self.gpus_per_worker} cannot be shared out evenly among "
                f"--nodes-per-worker {self.nodes_per_worker}",
                hint="give the GPUs of all nodes of a worker together",
            )
        if self.disk_mib and not self.host_memory_mib:
            raise UsageError("--disk-mib without --host-memory-mib", hint="a disk is read to there: give some of both")
        if self.disk_mib and self.gpus_per_worker > 1:
            raise UsageError(
                f"--disk-mib: a model that {self.gpus_per_worker} GPUs share has no disk tier", hint="leave it out"
            )
        if self.workers_max < self.workers:
            raise UsageError(f"--workers-max {self.workers_max} is less than --workers {self.workers}")

    def image(self, name: str) -> str:
        prefix = f"{self.registry.rstrip('/')}/" if self.registry else ""
        return f"{prefix}coppice-{name}:{self.tag}"
