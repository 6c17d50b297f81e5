"""`coppice render ...`: manifests of a stack for an orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice import __version__
from coppice.errors import UsageError
from coppice_cli.variables import Command


def add_to(render: typer.Typer) -> None:
    """Hang the commands up under `coppice render`."""
    render.callback()(about)
    render.command(cls=Command)(kubernetes)


def about() -> None:
    """Manifests of a stack for an orchestrator."""


def kubernetes(
    out: Annotated[Path, typer.Option(help="Folder to write; it must be empty, or not be there.", show_default=False)],
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "coppice",
    registry: Annotated[str, typer.Option(help="Where the images lie, such as registry.example.com/team.")] = "",
    tag: Annotated[str, typer.Option(help="Tag of the images.")] = __version__,
    model_name: Annotated[str, typer.Option(help="What clients call the model.")] = "coppice-demo",
    model_claim: Annotated[str, typer.Option(help="PersistentVolumeClaim with a checkpoint folder.")] = "coppice-model",
    workers: Annotated[int, typer.Option(help="Number of gpu-workers.")] = 1,
    workers_max: Annotated[int, typer.Option(help="Workers that KEDA may start.")] = 4,
    gpus_per_worker: Annotated[
        int, typer.Option(help="GPUs of each worker, on all its nodes, in the gpu overlay.")
    ] = 1,
    nodes_per_worker: Annotated[
        int, typer.Option(help="Nodes that share out a worker's GPUs; above 1 a worker is a LeaderWorkerSet.")
    ] = 1,
    host_memory_mib: Annotated[int, typer.Option(help="Memory per worker for blocks off the device; 0: none.")] = 0,
    disk_mib: Annotated[
        int, typer.Option(help="Disk of the node per worker, for blocks that its memory has no room for; 0: none.")
    ] = 0,
    issuer: Annotated[str, typer.Option(help="Issuer of cert-manager that signs for the services.")] = "coppice-ca",
    storage_class: Annotated[str, typer.Option(help="For the cache's epoch. Default: that of the cluster.")] = "",
    otlp_endpoint: Annotated[str, typer.Option(help="Collector of traces, https://HOST:4317. Default: none.")] = "",
    prometheus: Annotated[
        str, typer.Option(help="Prometheus that KEDA asks.")
    ] = "http://prometheus-operated.monitoring.svc:9090",
    monitoring_namespace: Annotated[str, typer.Option(help="Namespace whose pods may scrape metrics.")] = "monitoring",
) -> None:
    """Write a Kustomize tree: a base, overlays cpu, gpu and ha, components for Prometheus and KEDA."""
    from coppice_render.kustomize import files
    from coppice_render.options import RenderOptions

    options = RenderOptions(
        namespace=namespace,
        registry=registry,
        tag=tag,
        model_name=model_name,
        model_claim=model_claim,
        workers=workers,
        workers_max=workers_max,
        gpus_per_worker=gpus_per_worker,
        nodes_per_worker=nodes_per_worker,
        host_memory_mib=host_memory_mib,
        disk_mib=disk_mib,
        issuer=issuer,
        storage_class=storage_class,
        otlp_endpoint=otlp_endpoint,
        prometheus=prometheus,
        monitoring_namespace=monitoring_namespace,
    )
    made = files(options)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is not empty", hint="name a new folder; what lies there is not overwritten")
    for name, text in made.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    typer.echo(f"{out} has {len(made)} files; docs/KUBERNETES.md says what they need", err=True)
    typer.echo(f"kubectl apply -k {out}/overlays/gpu", err=True)
